//! The retry delay in gRPC's
//! [richer error model](https://grpc.io/docs/guides/error/#richer-error-model).
//!
//! It takes four small messages, which need only two field types of the
//! [wire format](https://protobuf.dev/programming-guides/encoding/). `prost` could encode them as
//! well, but then every user of the feature `http` would have to compile it and, with its derive,
//! a second `syn`.

use std::time::Duration;

use super::GrpcCode;

const TYPE: &[u8] = b"type.googleapis.com/google.rpc.RetryInfo";
/// The longest `google.protobuf.Duration`, about 10,000 years.
const LONGEST: Duration = Duration::new(315_576_000_000, 999_999_999);

/// Encodes the details of a gRPC status that invites the caller to retry after `after`.
///
/// The result is a `google.rpc.Status` with this code and message and one `google.rpc.RetryInfo`.
/// It is sent in base64 as `grpc-status-details-bin`.
pub fn retry_info(code: GrpcCode, message: &str, after: Duration) -> Vec<u8> {
    let after = after.min(LONGEST);
    let (seconds, nanos) = (after.as_secs(), after.subsec_nanos().into());
    let duration = Message::default().number(1, seconds).number(2, nanos);
    let retry_info = Message::default().bytes(1, &duration.0);
    let any = Message::default().bytes(1, TYPE).bytes(2, &retry_info.0);
    let mut status = Message::default().number(1, code as u64);
    // As usual in proto3, an empty field is omitted.
    if !message.is_empty() {
        status = status.bytes(2, message.as_bytes());
    }
    status.bytes(3, &any.0).0
}

/// A message that is being encoded. Its field numbers are less than 16.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn number(self, field: u8, value: u64) -> Self {
        if value == 0 {
            self
        } else {
            self.varint(u64::from(field) << 3).varint(value)
        }
    }

    /// Appends a string or a nested message.
    fn bytes(self, field: u8, bytes: &[u8]) -> Self {
        const DELIMITED: u64 = 2;
        let tag = u64::from(field) << 3 | DELIMITED;
        let mut message = self.varint(tag).varint(bytes.len() as u64);
        message.0.extend_from_slice(bytes);
        message
    }

    fn varint(mut self, mut value: u64) -> Self {
        const MORE: u8 = 0x80;
        while value >= MORE.into() {
            self.0.push(value as u8 | MORE);
            value >>= 7;
        }
        self.0.push(value as u8);
        self
    }
}

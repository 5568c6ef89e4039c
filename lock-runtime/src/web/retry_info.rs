//! When to try again, in the words of gRPC's [richer error model](https://grpc.io/docs/guides/error/#richer-error-model).
//!
//! Four small messages, of which the [wire format](https://protobuf.dev/programming-guides/encoding/) needs two kinds of
//! fields. `prost` would do as well, but everybody who answers over HTTP would compile it, and with its derive a second `syn`.

use std::time::Duration;

use super::GrpcCode;

const TYPE: &[u8] = b"type.googleapis.com/google.rpc.RetryInfo";
/// What a `google.protobuf.Duration` may say at most, some 10,000 years.
const LONGEST: Duration = Duration::new(315_576_000_000, 999_999_999);

/// The details of a gRPC status that invites the caller to try again in `after`: an encoded `google.rpc.Status` of this code
/// and message with one `google.rpc.RetryInfo`. It goes out as `grpc-status-details-bin`, in base64.
pub fn retry_info(code: GrpcCode, message: &str, after: Duration) -> Vec<u8> {
    let after = after.min(LONGEST);
    let duration = Message::default()
        .number(1, after.as_secs())
        .number(2, after.subsec_nanos().into());
    let retry_info = Message::default().bytes(1, &duration.0);
    let any = Message::default().bytes(1, TYPE).bytes(2, &retry_info.0);
    let status = Message::default().number(1, code as u64);
    // As everywhere in proto3, what is empty is left out.
    let status = if message.is_empty() {
        status
    } else {
        status.bytes(2, message.as_bytes())
    };
    status.bytes(3, &any.0).0
}

/// A message as far as it is written. Its fields have numbers under 16.
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

    /// A string, or a message in the message.
    fn bytes(self, field: u8, bytes: &[u8]) -> Self {
        const DELIMITED: u64 = 2;
        let mut message = self
            .varint(u64::from(field) << 3 | DELIMITED)
            .varint(bytes.len() as u64);
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

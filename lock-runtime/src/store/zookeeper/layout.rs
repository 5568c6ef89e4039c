//! The nodes of a namespace, and their data.

use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

use crate::store::{
    ClientId,
    records::{Record, RecordName, Version},
};

/// The nodes of a namespace.
pub(super) struct Layout(pub(super) String);

impl Layout {
    pub(super) fn format(&self) -> String {
        format!("{}/format", self.0)
    }

    pub(super) fn clock(&self) -> String {
        format!("{}/c", self.0)
    }

    pub(super) fn directory(&self, number: usize) -> String {
        format!("{}/r/{number:02x}", self.0)
    }

    pub(super) fn directory_of(&self, name: &RecordName) -> String {
        let hash = sha1_smol::Sha1::from(name.as_str()).digest().bytes();
        self.directory(hash[0].into())
    }

    pub(super) fn record(&self, name: &RecordName) -> String {
        // Else a name could have several parts, or be `.`.
        let encoded = utf8_percent_encode(name.as_str(), NON_ALPHANUMERIC);
        format!("{}/{encoded}", self.directory_of(name))
    }

    pub(super) fn name(child: &str) -> Option<RecordName> {
        Some(RecordName::new(
            percent_decode_str(child).decode_utf8().ok()?,
        ))
    }

    /// The node that shows that a client reads its messages.
    pub(super) fn reader(&self, client: ClientId) -> String {
        format!("{}/a/{client}", self.0)
    }

    pub(super) fn messages_to(&self, client: ClientId) -> String {
        format!("{}/m/{client}", self.0)
    }
}

/// The data of a node for a record.
pub(super) enum Content {
    Record { needed_until: u64, record: Record },
    Removed { at: u64 },
}

impl Content {
    pub(super) fn of(data: &[u8]) -> Option<Self> {
        let (first, rest) = data.split_first_chunk::<8>()?;
        let first = u64::from_be_bytes(*first);
        let Some((needed_until, body)) = rest.split_first_chunk::<8>() else {
            return rest.is_empty().then_some(Self::Removed { at: first });
        };
        Some(Self::Record {
            needed_until: u64::from_be_bytes(*needed_until),
            record: Record::new(Version::from_number(first)?, body.to_vec()),
        })
    }
}

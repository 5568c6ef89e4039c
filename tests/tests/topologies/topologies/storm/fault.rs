//! The faults of a storm.

use std::time::Instant;

/// The start of a deliberate fault.
#[derive(Clone, Debug)]
pub(super) struct Fault {
    pub(super) name: String,
    pub(super) at: Instant,
    pub(super) out: Out,
}

/// The keys for which no service is promised.
#[derive(Clone, Debug)]
pub(super) enum Out {
    None,
    Some(Vec<String>),
    All,
}

impl Out {
    pub(super) fn has(&self, key: &str) -> bool {
        match self {
            Self::None => false,
            Self::Some(keys) => keys.iter().any(|out| out == key),
            Self::All => true,
        }
    }
}

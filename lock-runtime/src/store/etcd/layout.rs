//! The keys of a namespace in etcd.

use std::{fmt, sync::Arc};

use super::ClientId;

/// The keys of a namespace.
#[derive(Clone)]
pub(super) struct Layout(pub(super) Arc<str>);

impl Layout {
    fn key(&self, rest: fmt::Arguments<'_>) -> Vec<u8> {
        format!("{}/{rest}", self.0).into_bytes()
    }

    pub(super) fn format(&self) -> Vec<u8> {
        self.key(format_args!("format"))
    }

    pub(super) fn clock(&self) -> Vec<u8> {
        self.key(format_args!("c"))
    }

    /// The key of a record, or the first key of those whose names begin with this.
    pub(super) fn record(&self, name: &str) -> Vec<u8> {
        self.key(format_args!("r/{name}"))
    }

    pub(super) fn message(&self, to: ClientId, number: usize) -> Vec<u8> {
        self.key(format_args!("m/{to}/{number}"))
    }

    /// The range of the messages to a client.
    pub(super) fn messages_to(&self, client: ClientId) -> (Vec<u8>, Vec<u8>) {
        // '0' is the character after '/'.
        let [first, end] = ['/', '0'].map(|end| self.key(format_args!("m/{client}{end}")));
        (first, end)
    }

    pub(super) fn micros(value: &[u8]) -> Option<u64> {
        value.try_into().ok().map(u64::from_be_bytes)
    }
}

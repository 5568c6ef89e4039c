//! Spans that are never created, without the feature `tracing`, so that the context of a user's own
//! events does not change.

use std::future::Future;

use super::Grant;
use crate::{
    error::{LockError, Loss},
    guard::fence::FencingToken,
    request::key::LockKey,
    request::name::RequestName,
    request::spec::Mode,
};

pub(crate) struct AttemptSpan;

impl AttemptSpan {
    pub(super) fn begin(_name: Option<&RequestName>, _keys: &[LockKey], _mode: Mode) -> Self {
        Self
    }

    pub(super) fn within<F: Future>(&self, request: F) -> F {
        request
    }

    pub(super) fn ended(&self, _outcome: Result<Grant, &LockError>) {}
}

#[derive(Debug, Default)]
pub(crate) struct HoldSpan;

impl HoldSpan {
    pub(super) fn begun(
        &self,
        _name: Option<&RequestName>,
        _key: &LockKey,
        _mode: Mode,
        _fence: FencingToken,
        _request: Option<&AttemptSpan>,
    ) {
    }

    pub(crate) fn within<T>(&self, work: impl FnOnce() -> T) -> T {
        work()
    }

    pub(super) fn ended(&self, _loss: Option<Loss>) {}
}

pub(crate) struct ReleaseSpan;

impl ReleaseSpan {
    pub(crate) fn begin(
        _name: Option<&RequestName>,
        _key: &LockKey,
        _mode: Mode,
        _fence: FencingToken,
    ) -> Self {
        Self
    }

    pub(crate) fn within<T>(&self, work: impl FnOnce() -> T) -> T {
        work()
    }

    pub(crate) fn ended(&self, _released: &Result<(), LockError>) {}
}

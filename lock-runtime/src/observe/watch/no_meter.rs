//! Meters that record nothing, without the feature `metrics`.

use super::{Grant, OnceOutcome};
use crate::{
    error::{LockError, Loss},
    protocol::Source,
    request::name::RequestName,
    request::spec::Mode,
};

pub(crate) struct WatchedRequest;

impl WatchedRequest {
    pub(super) fn begin(_name: Option<&RequestName>, _mode: Mode) -> Self {
        Self
    }

    pub(super) fn ended(&mut self, _outcome: Result<Grant, &LockError>) {}

    pub(super) fn granted(&self, _source: Source) -> Hold {
        Hold
    }
}

pub(super) fn refused(_name: Option<&RequestName>, _mode: Mode, _error: &LockError) {}

pub(super) fn once(_name: Option<&RequestName>, _outcome: OnceOutcome, _stored: usize) {}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Hold;

impl Hold {
    pub(super) fn downgraded(self, _name: Option<&RequestName>) -> Self {
        self
    }

    pub(super) fn begun(self) {}

    pub(super) fn ended(self, _loss: Option<Loss>) {}

    pub(crate) fn lost(self, _loss: Loss) {}

    pub(crate) fn renewed(self, _is_confirmed: bool) {}
}

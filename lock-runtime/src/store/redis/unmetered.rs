//! No metrics of calls to servers, without the feature `metrics`.

use redis::Value;

use super::{connection::Connection, scripts::Call};

pub(super) struct Metered;

impl Metered {
    pub(super) fn begin(_connection: &Connection, _call: &Call) -> Self {
        Self
    }

    pub(super) fn ended<'v, E>(self, _result: Result<impl IntoIterator<Item = &'v Value>, E>) {}
}

pub(super) fn grouped(_connection: &Connection, _call: &Call, _size: usize) {}

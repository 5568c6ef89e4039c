//! No metrics of calls to servers, without the feature `metrics`.

use redis::Value;

use super::{super::script::Call, Connection};

pub(crate) struct Metered;

impl Metered {
    pub(crate) fn begin(_connection: &Connection, _call: &Call) -> Self {
        Self
    }

    pub(crate) fn ended<'v, E>(self, _result: Result<impl IntoIterator<Item = &'v Value>, E>) {}
}

pub(crate) fn grouped(_connection: &Connection, _call: &Call, _size: usize) {}

//! The servers of a quorum by their `run_id`, to find two addresses of the same one.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use crate::{
    shell::sync::lock,
    store::{StoreError, StoreErrorKind},
};

/// The names of the servers that have connected, by `run_id`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Runs(Arc<Mutex<HashMap<String, String>>>);

impl Runs {
    /// Registers the run of the server `name`.
    ///
    /// # Errors
    /// `InvalidUrl` if another name has the same run: the server would have two votes.
    pub(crate) fn register(&self, name: &str, run_id: &str) -> Result<(), StoreError> {
        let mut runs = lock(&self.0);
        // An earlier run of this server is over.
        runs.retain(|run, server| server != name || run == run_id);
        let first = runs
            .entry(run_id.to_owned())
            .or_insert_with(|| name.to_owned());
        match first == name {
            true => Ok(()),
            false => Err(StoreError::new(
                StoreErrorKind::InvalidUrl,
                same_server(first, name),
            )),
        }
    }

    /// Leaves the run of the server `name` to another name of it.
    pub(crate) fn forget(&self, name: &str) {
        lock(&self.0).retain(|_, server| server != name);
    }
}

pub(super) fn same_server(one: &str, other: &str) -> String {
    format!("{one} and {other} are the same server, which would have two votes")
}

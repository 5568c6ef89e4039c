//! The servers of a quorum by their `run_id`, to find two addresses of the same one.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use crate::{
    shell::sync::lock,
    store::{StoreError, StoreErrorKind},
};

/// The runs of the servers that have connected, by the name of the server.
#[derive(Clone, Debug, Default)]
pub(crate) struct Runs(Arc<Mutex<HashMap<String, Run>>>);

#[derive(Debug)]
struct Run {
    id: String,
    votes: bool,
}

impl Runs {
    /// Registers the run of the server `name`, in place of an earlier one.
    ///
    /// # Errors
    /// `InvalidUrl` if another name of the same run has the vote.
    pub(crate) fn register(&self, name: &str, run_id: &str) -> Result<(), StoreError> {
        let mut runs = lock(&self.0);
        let mut others = runs.iter().filter(|(server, _)| *server != name);
        let first = others.find(|(_, run)| run.votes && run.id == run_id);
        let first = first.map(|(server, _)| server.clone());
        let run = Run {
            id: run_id.to_owned(),
            votes: first.is_none(),
        };
        runs.insert(name.to_owned(), run);
        first.map_or(Ok(()), |first| Err(same_server(&first, name)))
    }

    /// Leaves the vote of the server `name` to another name of the same run.
    pub(crate) fn leave(&self, name: &str) {
        if let Some(run) = lock(&self.0).get_mut(name) {
            run.votes = false;
        }
    }

    /// Returns the error of [`register`](Self::register) if another name has the same run by now.
    pub(crate) fn check(&self, name: &str) -> Result<(), StoreError> {
        let runs = lock(&self.0);
        let Some(own) = runs.get(name) else {
            return Ok(());
        };
        let mut others = runs.iter().filter(|(server, _)| *server != name);
        let other = others.find(|(_, run)| run.id == own.id);
        other.map_or(Ok(()), |(other, _)| Err(same_server(other, name)))
    }
}

/// The error for two names of one server.
pub(super) fn same_server(one: &str, other: &str) -> StoreError {
    let message = format!("{one} and {other} are the same server, which would have two votes");
    StoreError::new(StoreErrorKind::InvalidUrl, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_name_of_a_server_is_found_whichever_registers_first() {
        let runs = Runs::default();
        assert!(runs.register("second", "a").is_ok());
        assert!(runs.register("third", "b").is_ok());
        // The server has the settings of the other name.
        runs.leave("second");
        assert!(runs.check("second").is_ok());
        assert!(runs.register("first", "a").is_ok());
        for refused in [runs.check("second"), runs.register("second", "a")] {
            let error = refused.unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::InvalidUrl);
            assert!(error.to_string().contains("first and second"), "{error}");
        }
        assert!(runs.check("third").is_ok());
        // A server at another address has started anew there.
        assert!(runs.register("second", "c").is_ok());
    }
}

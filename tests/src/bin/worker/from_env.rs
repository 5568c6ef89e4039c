//! Connects by the environment variables of the process.

use lock_runtime::{LockClient, LockClientBuilder, LockError};
use lock_tests::{Captured, chain, processes::Parent};

/// Prints the warnings about the variables, then acquires and releases "k", and prints `released`,
/// or the code of the error and its message.
#[derive(clap::Args)]
pub(crate) struct FromEnv {}

impl FromEnv {
    pub(crate) async fn run(self, mut parent: Parent) {
        let traces = Captured::new();
        // The error is that of the other call as well.
        let read = || drop(LockClientBuilder::from_env());
        tracing::dispatcher::with_default(&traces.dispatch(), read);
        for event in traces.events() {
            let field = |name| event.field(name).unwrap_or_default();
            parent.say(format!("{} -> {}", field("name"), field("meant")));
        }
        parent.say(match locked().await {
            Ok(()) => "released".to_owned(),
            Err(error) => format!("{} {}", error.code(), chain(&error)),
        });
        parent.finished().await;
    }
}

async fn locked() -> Result<(), LockError> {
    let locks = LockClient::from_env().await?;
    locks.exclusive("k").acquire().await?.release().await
}

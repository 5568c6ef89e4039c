//! Connects by the environment variables of the process.

use std::time::Duration;

use lock_runtime::{LockClient, LockClientBuilder, LockError};
use lock_tests::{Captured, chain, processes::Parent};
use tokio::time::sleep;

/// Prints the warnings about the variables, then holds "k" until the store has the name of the
/// client, and prints `released`, or the code of the error and its message.
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
    let guard = locks.exclusive("k").acquire().await?;
    // The name of the client follows its first grant.
    loop {
        let holders = locks.inspect("k").await?.holders;
        if holders.iter().any(|holder| holder.client.name().is_some()) {
            return guard.release().await;
        }
        sleep(Duration::from_millis(5)).await;
    }
}

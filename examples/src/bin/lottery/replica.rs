//! A replica of the service: a process, or a task if there is no shared store.

use std::{
    process::ExitCode,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::Context;
use lock_examples::{Child, order, say};
use lock_runtime::LockClient;
use tokio::time::sleep;

use crate::draw::{Outcome, fire};

/// A replica that waits for its instant.
#[derive(Debug)]
pub(crate) enum Replica {
    Process(Box<Child>),
    Task,
}

impl Replica {
    /// Starts a process that uses the store at `url`, and waits until it is connected.
    pub(crate) async fn start(url: &str, run: &str) -> anyhow::Result<Self> {
        let mut child = Child::spawn([format!("--child-of={run}"), format!("--redis={url}")])?;
        child.line().await?;
        Ok(Self::Process(child.into()))
    }

    /// Fires the job at `instant`, and returns its outcome.
    pub(crate) async fn fire(&mut self, instant: SystemTime) -> anyhow::Result<Outcome> {
        match self {
            Self::Process(child) => {
                child
                    .tell(&instant.duration_since(UNIX_EPOCH)?.as_millis().to_string())
                    .await?;
                child.line().await?.parse()
            }
            Self::Task => tokio::spawn(async move {
                sleep_until(instant).await;
                fire().await
            })
            .await
            .context("a replica panicked"),
        }
    }

    /// Ends the replica, and waits until it has terminated.
    pub(crate) async fn end(self) -> anyhow::Result<()> {
        match self {
            Self::Process(child) => child.end().await.map(drop),
            Self::Task => Ok(()),
        }
    }
}

/// The main function of a replica that is a process.
pub(crate) async fn follow_orders(url: &str, run: &str) -> anyhow::Result<ExitCode> {
    // A service would have a fixed namespace. Here each run has its own, so that it does not have
    // to wait for the `min_hold` of the previous run.
    let locks = LockClient::builder().namespace(run).connect(url).await?;
    locks.install()?;
    say("ready");
    if let Some(instant) = order().await? {
        sleep_until(UNIX_EPOCH + Duration::from_millis(instant.parse()?)).await;
        say(fire().await);
    }
    locks.shutdown().await;
    Ok(ExitCode::SUCCESS)
}

/// Waits for a time of day, like a scheduler.
async fn sleep_until(instant: SystemTime) {
    sleep(
        instant
            .duration_since(SystemTime::now())
            .unwrap_or_default(),
    )
    .await;
}

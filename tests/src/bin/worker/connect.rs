//! Connects by a URL alone, in a process with an environment and a crypto provider chosen by the
//! test.

use lock_runtime::{LockClient, LockError};
use lock_tests::{chain, processes::Parent};

/// Acquires and releases "k", and prints `released`, or the code of the error and its message.
#[derive(clap::Args)]
pub(crate) struct Connect {
    url: String,
    /// Installs no crypto provider.
    #[arg(long)]
    no_provider: bool,
}

impl Connect {
    pub(crate) async fn run(self, mut parent: Parent) {
        if !self.no_provider {
            rustls::crypto::ring::default_provider()
                .install_default()
                .expect("no provider is installed yet");
        }
        parent.say(match locked(&self.url).await {
            Ok(()) => "released".to_owned(),
            Err(error) => format!("{} {}", error.code(), chain(&error)),
        });
        parent.finished().await;
    }
}

async fn locked(url: &str) -> Result<(), LockError> {
    let locks = LockClient::connect(url).await?;
    locks.exclusive("k").acquire().await?.release().await
}

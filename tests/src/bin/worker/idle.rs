//! Does nothing: prints `ready`, repeats every line, and ends when its input does.

use lock_tests::processes::Parent;

/// Repeats its input until it ends.
#[derive(clap::Args)]
pub(crate) struct Idle {
    /// Goes on after its input has ended, like a worker that hangs.
    #[arg(long)]
    deaf: bool,
}

impl Idle {
    pub(crate) async fn run(self, mut parent: Parent) {
        parent.say("ready");
        while let Some(line) = parent.line().await {
            parent.say(line);
        }
        if self.deaf {
            std::future::pending().await
        }
    }
}

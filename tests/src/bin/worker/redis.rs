//! Starts a server and ends in a given way without stopping it, to show that the server ends as
//! well.

use std::process;

use clap::ValueEnum;
use lock_tests::{RedisServer, processes::Parent};

/// Starts a redis-server, prints its port and its pid, waits for the end of its input, and ends.
#[derive(clap::Args)]
pub(crate) struct Redis {
    /// How it ends.
    #[arg(long, default_value = "return")]
    end: End,
    /// Stops the server (SIGSTOP) first.
    #[arg(long)]
    stopped: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum End {
    /// The destructors run.
    Return,
    /// They don't.
    Exit,
    /// They do, while unwinding.
    Panic,
    /// No destructor of the server will ever run.
    Forget,
}

impl Redis {
    pub(crate) async fn run(self, mut parent: Parent) {
        let server = RedisServer::start().await;
        if self.stopped {
            server.stop();
        }
        parent.say(format!("{} {}", server.port(), server.pid()));
        parent.finished().await;
        match self.end {
            End::Return => drop(server),
            End::Exit => process::exit(0),
            End::Panic => panic!("as the test has asked"),
            End::Forget => std::mem::forget(server),
        }
    }
}

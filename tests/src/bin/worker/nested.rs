//! Has a stopped worker of its own, to show that the worker ends when this process is killed.

use std::env;

use lock_tests::{Worker, processes::Parent};

/// Starts a worker with a redis-server, stops the worker, prints its server's port and pid, and
/// waits.
#[derive(clap::Args)]
pub(crate) struct Nested {}

impl Nested {
    pub(crate) async fn run(self, mut parent: Parent) {
        let path = env::current_exe().expect("a running program has a path");
        let mut worker = Worker::spawn(path.to_str().expect("a path in UTF-8"), &["redis"]);
        let server = worker.line().await.expect("the worker starts a server");
        worker.stop();
        parent.say(server);
        parent.finished().await;
    }
}

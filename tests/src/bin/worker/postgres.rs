//! Starts a PostgreSQL server and waits to be killed, to show that no process of the server
//! survives.

use lock_tests::{PostgresServer, processes::Parent};
use tokio::time::{Duration, sleep};

/// A query that does not notice the end of the server's first process.
const ENDLESS: &str = "select count(*) from generate_series(1, 1e12)";

/// Starts a PostgreSQL server, lets a backend compute, prints the port and the pid of the server,
/// and waits for the end of its input.
#[derive(clap::Args)]
pub(crate) struct Postgres {
    /// Stops the server (SIGSTOP) first.
    #[arg(long)]
    stopped: bool,
}

impl Postgres {
    pub(crate) async fn run(self, mut parent: Parent) {
        let server = PostgresServer::builder().in_memory().start().await;
        let client = server.connect().await;
        let endless = tokio::spawn(async move { client.simple_query(ENDLESS).await });
        let watching = server.connect().await;
        let busy = "select from pg_stat_activity where state = 'active' and query = $1";
        while watching
            .query(busy, &[&ENDLESS])
            .await
            .expect("an answer")
            .is_empty()
        {
            sleep(Duration::from_millis(5)).await;
        }
        if self.stopped {
            server.stop();
        }
        parent.say(format!("{} {}", server.port(), server.pid()));
        parent.finished().await;
        drop(endless);
    }
}

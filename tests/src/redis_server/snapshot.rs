//! Data of a server at one moment, for a restart with these data or with older ones than it had.

use std::{fmt, fs};

use tokio::time::{Instant, sleep, timeout};

use super::{PATIENCE, POLL, RedisServer};
use crate::supervised::Supervised;

/// The file from which a server loads its data at the start.
pub(super) const FILE: &str = "dump.rdb";

/// The append-only file of a server that has not rewritten it.
const APPEND_ONLY: [&str; 3] = [
    "appendonlydir/appendonly.aof.manifest",
    "appendonlydir/appendonly.aof.1.base.rdb",
    "appendonlydir/appendonly.aof.1.incr.aof",
];

/// The data of a [`RedisServer`] at one moment. Keys that have expired by the time of a load do not
/// come back.
#[derive(Clone)]
pub struct Snapshot(Vec<u8>);

impl RedisServer {
    /// The data that the server has now.
    ///
    /// # Panics
    /// When the server does not answer within ten seconds.
    pub async fn save_snapshot(&self) -> Snapshot {
        let deadline = Instant::now() + PATIENCE;
        // Redis refuses SAVE while it saves the data for a replica.
        while let Err(error) = self.try_command(&["SAVE"]).await {
            assert!(Instant::now() < deadline, "SAVE: {error}");
            sleep(POLL).await;
        }
        let state = self.state();
        let process = state.process.as_ref().expect("it has just answered");
        Snapshot(fs::read(process.directory().join(FILE)).expect("the server has just written it"))
    }

    /// Kills the server if it still runs, and starts it again on the same port, with the same
    /// settings and these data: its own older ones, as after a crash, or those of another server.
    ///
    /// # Panics
    /// When the server does not answer within ten seconds, with its log.
    pub async fn restart_from(&self, snapshot: &Snapshot) {
        self.kill();
        self.start_again(Some(snapshot)).await;
    }

    /// Ends the server, and starts it again on the same port, with the same settings and all data
    /// that it had at its end: no write with a reply is lost.
    ///
    /// # Panics
    /// When the server was killed or stopped before, or does not answer within ten seconds.
    pub async fn restart_keeping_data(&self) {
        let (mut log, file) = {
            let state = self.state();
            let process: &Supervised = state.process.as_ref().expect("the server was killed");
            (process.log(), process.directory().join(FILE))
        };
        // NOW: it does not wait for replicas. On success the connection ends without a reply.
        let refused = self.try_command(&["SHUTDOWN", "SAVE", "NOW"]).await;
        let end = timeout(PATIENCE, log.wait_for(|log| log.ended)).await;
        assert!(
            end.is_ok(),
            "the server does not end: {refused:?}; its log:\n{}",
            self.log()
        );
        let snapshot = Snapshot(fs::read(file).expect("the server has written it at its end"));
        self.restart_from(&snapshot).await;
    }
}

impl RedisServer {
    /// SIGKILL, and a start on the same port with the data of the append-only file. With
    /// `appendonly yes` and `appendfsync always` no write with a reply is lost.
    ///
    /// # Panics
    /// When the server was killed before, has no append-only file, or does not answer within ten
    /// seconds.
    pub async fn restart_from_log(&self) {
        self.kill_keeping(&APPEND_ONLY);
        self.start_again(None).await;
    }
}

impl Snapshot {
    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snapshot")
            .field("bytes", &self.0.len())
            .finish()
    }
}

//! What a server has stored, at a moment: to start it again with that, or with something older than it had.

use std::{fmt, fs};

use tokio::time::{Instant, sleep, timeout};

use super::{PATIENCE, POLL, RedisServer};
use crate::supervised::Supervised;

/// Where a server looks for its data when it starts.
pub(super) const FILE: &str = "dump.rdb";

/// The append-only file of a server that has not rewritten it.
const APPEND_ONLY: [&str; 3] = [
    "appendonlydir/appendonly.aof.manifest",
    "appendonlydir/appendonly.aof.1.base.rdb",
    "appendonlydir/appendonly.aof.1.incr.aof",
];

/// The data of a [`RedisServer`] at a moment. What has run out by the time it is loaded does not come back.
#[derive(Clone)]
pub struct Snapshot(Vec<u8>);

impl RedisServer {
    /// What it has stored now.
    ///
    /// # Panics
    /// When it does not answer within ten seconds.
    pub async fn save_snapshot(&self) -> Snapshot {
        let deadline = Instant::now() + PATIENCE;
        // It refuses while it writes the same for a replica.
        while let Err(error) = self.try_command(&["SAVE"]).await {
            assert!(Instant::now() < deadline, "SAVE: {error}");
            sleep(POLL).await;
        }
        let state = self.state();
        let process = state.process.as_ref().expect("it has just answered");
        Snapshot(fs::read(process.directory().join(FILE)).expect("the server has just written it"))
    }

    /// Kills it if it still runs, and starts it again on the same port, with the same settings and these data: older ones
    /// of its own, as after a crash, or those of another server.
    ///
    /// # Panics
    /// When it does not answer within ten seconds, with the server's log.
    pub async fn restart_from(&self, snapshot: &Snapshot) {
        self.kill();
        self.start_again(Some(snapshot)).await;
    }

    /// Starts it again on the same port, with the same settings and all it had when it ended: nothing that it has
    /// answered is lost.
    ///
    /// # Panics
    /// When it was killed or stopped before, or does not answer within ten seconds.
    pub async fn restart_keeping_data(&self) {
        let (mut log, file) = {
            let state = self.state();
            let process: &Supervised = state.process.as_ref().expect("the server was killed");
            (process.log(), process.directory().join(FILE))
        };
        // NOW: it does not wait for replicas. That the connection ends without a reply says that it worked.
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
    /// SIGKILL, and a start on the same port with what its append-only file has. Of a server with `appendonly yes` and
    /// `appendfsync always` nothing that it has answered is lost.
    ///
    /// # Panics
    /// When it was killed before, has no append-only file, or does not answer within ten seconds.
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

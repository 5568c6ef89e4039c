//! The scripts that run on the server, one per operation, and the encoding of their calls.
//!
//! A script is called by its digest. A server that does not know it (after a restart, a failover
//! or `SCRIPT FLUSH`) reports that before anything ran, and is sent the text once. `SCRIPT LOAD`
//! would have to be sent to every node of a cluster.

use std::{sync::LazyLock, time::Duration};

use redis::Cmd;

use super::names::Names;
use crate::{
    spec::{LockKind, Mode},
    store::{Hold, Token},
};

/// A script and its SHA-1, by which the server identifies it.
pub(super) struct Script {
    name: &'static str,
    body: &'static str,
    digest: String,
}

macro_rules! scripts {
    ($($(#[$doc:meta])* $script:ident = $($part:literal)+;)+) => {$(
        $(#[$doc])*
        pub(super) static $script: LazyLock<Script> =
            LazyLock::new(|| Script::new(stringify!($script), concat!($(include_str!(concat!("lua/", $part, ".lua"))),+)));
    )+};
}

scripts! {
    /// Grants all locks or none. A single request may enter the wait queue.
    ACQUIRE = "acquire_free" "clock" "fence" "holders" "standing" "line" "acquire";
    /// Grants free exclusive locks to several requests.
    ACQUIRE_GROUP = "acquire_group";
    /// Releases the locks of several writers.
    RELEASE_GROUP = "release_group";
    /// Returns whether the token holds or waits.
    POLL = "clock" "fence" "holders" "standing" "line" "poll";
    /// Extends a writer's lease.
    RENEW = "renew";
    /// Extends the lease of a share.
    RENEW_SHARE = "clock" "holders" "standing" "renew_share";
    /// Releases a writer's lock, and hands it off or reserves it.
    RELEASE = "release" "clock" "fence" "holders" "standing" "line" "hand_over";
    /// Releases a share, and may reserve it.
    RELEASE_SHARE = "clock" "fence" "holders" "standing" "line" "release_share";
    /// Releases a lock and acquires it under another token, or queues that token.
    PASS = "clock" "fence" "holders" "standing" "line" "pass";
    /// Converts a writer into a reader.
    CONVERT = "clock" "fence" "holders" "standing" "line" "convert";
    /// Abandons a token, which may hold or wait.
    ABANDON = "clock" "fence" "holders" "standing" "line" "abandon";
    /// Writes to a key of a grant, for the replicas.
    REPLICATE = "clock" "holders" "standing" "replicate";
    /// Raises the next fencing token above a number, and gives that number to the caller.
    RAISE = "clock" "fence" "raise";
    /// Returns the marker of the server's data, and its age.
    MARKER = "clock" "marker";
    /// Releases the lock that a token may hold, by the key of the lock alone.
    FREE = "clock" "holders" "free";
    /// Returns the holders and the waiters.
    INSPECT = "clock" "fence" "holders" "standing" "line" "inspect";
    /// Revokes a lock.
    REVOKE = "clock" "fence" "holders" "standing" "line" "revoke";
}

impl Script {
    fn new(name: &'static str, body: &'static str) -> Self {
        let digest = redis::Script::new(body).get_hash().to_owned();
        Self { name, body, digest }
    }

    /// Returns whether the reply never confirms that a lock is held. A quarantined server may run
    /// such a script.
    pub(super) fn is_harmless(&self) -> bool {
        matches!(
            self.name,
            "RELEASE" | "RELEASE_GROUP" | "RELEASE_SHARE" | "ABANDON" | "INSPECT" | "REVOKE"
        )
    }

    /// Returns the call `by_digest` with the text of the script, which the server then caches.
    pub(super) fn by_text(&self, by_digest: &Cmd) -> Cmd {
        const DIGEST: usize = 2;
        let mut command = redis::cmd("EVAL");
        command.arg(self.body);
        for arg in by_digest.args_iter().skip(DIGEST) {
            if let redis::Arg::Simple(arg) = arg {
                command.arg(arg);
            }
        }
        command
    }
}

/// A call of a script by its digest. It is written straight into the command, as
/// renewals are frequent.
pub(super) struct Call {
    pub(super) script: &'static Script,
    pub(super) command: Cmd,
}

impl Call {
    /// Begins a call with the given number of keys, which precede all other arguments.
    pub(super) fn new(script: &'static Script, keys: usize) -> Self {
        let mut command = Cmd::with_capacity(3 + keys + 6, 256);
        command.arg("EVALSHA").arg(&script.digest).arg(keys);
        Self { script, command }
    }

    pub(super) fn arg(mut self, arg: impl AsRef<[u8]>) -> Self {
        self.command.arg(arg.as_ref());
        self
    }

    /// Adds the keys of a lock.
    pub(super) fn names(self, names: Names) -> Self {
        self.arg(names.lock).arg(names.fence).arg(names.queue)
    }

    pub(super) fn number(self, number: u32) -> Self {
        self.arg(number.to_string())
    }

    /// Adds the mode and the member of a hold.
    pub(super) fn hold(self, hold: &Hold) -> Self {
        let call = match hold.mode {
            Mode::Exclusive => self.arg("exclusive"),
            Mode::Shared => self.arg("shared"),
            Mode::Permits(permits) => self.number(permits.get()),
        };
        call.member(hold.mode, hold.token)
    }

    /// Adds an exclusive holder.
    pub(super) fn token(self, token: Token) -> Self {
        self.member(Mode::Exclusive, token)
    }

    /// Adds a holder. With permits the member contains their number, so that another number is
    /// detected while a permit is held.
    pub(super) fn member(self, mode: Mode, token: Token) -> Self {
        match mode {
            Mode::Permits(permits) => {
                self.arg([permits.to_string().as_bytes(), b":", &token.to_hex()].concat())
            }
            Mode::Exclusive | Mode::Shared => self.arg(token.to_hex()),
        }
    }

    pub(super) fn kind(self, kind: LockKind) -> Self {
        self.arg(match kind {
            LockKind::Lock => "lock",
            LockKind::Permits => "permits",
        })
    }

    /// Adds a duration in whole milliseconds, rounded up, as a lease must last as long as
    /// requested. The value is bounded, so that the server can add its time.
    pub(super) fn millis(self, duration: Duration) -> Self {
        const MOST: u128 = 1_000_000_000_000;
        let millis = duration.as_nanos().div_ceil(1_000_000);
        self.arg(millis.min(MOST).to_string())
    }

    /// The first key.
    pub(super) fn key(&self) -> &[u8] {
        const KEY: usize = 3;
        match self.command.args_iter().nth(KEY) {
            Some(redis::Arg::Simple(key)) => key,
            _ => &[],
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::store::{ENTRY_STALE_AFTER, ENTRY_TTL, HANDOFF_LEASE, POLL_INTERVAL};

    #[test]
    fn the_line_keeps_the_times_of_the_contract() {
        let [stale_after, ttl, handoff] =
            [ENTRY_STALE_AFTER, ENTRY_TTL, HANDOFF_LEASE].map(|time| time.as_millis());
        let names = "ENTRY_STALE_AFTER, ENTRY_TTL, HANDOFF_LEASE";
        let times = format!("local {names} = {stale_after}, {ttl}, {handoff}\n");
        let poll_interval = format!("local POLL_INTERVAL = {}\n", POLL_INTERVAL.as_millis());
        for line in [times, poll_interval] {
            assert!(include_str!("lua/line.lua").contains(&line), "{line}");
        }
    }
}

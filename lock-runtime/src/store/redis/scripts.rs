//! The scripts that run on the server, one per operation, and the encoding of their calls.
//!
//! A script is called by its digest. A server that does not know it (after a restart, a failover
//! or `SCRIPT FLUSH`) reports that before anything ran, and is sent the text once. `SCRIPT LOAD`
//! would have to be sent to every node of a cluster.

use std::{io::Write as _, sync::LazyLock, time::Duration};

use redis::Cmd;
use smallvec::SmallVec;

use super::names::Names;
use crate::{
    spec::{LockKind, Mode},
    store::{Hold, KeyPart, Token},
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
    /// Extends the leases of several writers.
    RENEW_GROUP = "renew_group";
    /// Returns whether the token holds or waits.
    POLL = "clock" "fence" "holders" "standing" "line" "poll";
    /// Extends a writer's lease.
    RENEW = "renew";
    /// Extends the lease of a share.
    RENEW_SHARE = "clock" "holders" "standing" "renew_share";
    /// Releases a writer's lock, and hands it off or reserves it.
    RELEASE = "refusal" "release" "clock" "fence" "holders" "standing" "line" "hand_over";
    /// Releases a writer's lock on a server of a quorum, and hands it off to a named heir.
    HAND_OFF = "refusal" "hand_off_free" "clock" "fence" "holders" "standing" "line" "hand_off";
    /// Releases a share, and may reserve it.
    RELEASE_SHARE = "release_share_free" "clock" "fence" "holders" "standing" "line" "release_share";
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
    INSPECT = "clock" "fence" "holders" "standing" "line" "holder_id" "inspect";
    /// Returns the commands that the user may not run.
    RIGHTS = "rights";
    /// Revokes a lock.
    REVOKE = "clock" "fence" "holders" "standing" "line" "holder_id" "revoke";
    /// Records the name of a client.
    INTRODUCE = "introduce";
    /// Returns the names of clients.
    NAMES = "names";
}

impl Script {
    fn new(name: &'static str, body: &'static str) -> Self {
        let digest = redis::Script::new(body).get_hash().to_owned();
        Self { name, body, digest }
    }

    /// Returns the name of the operation in metrics.
    #[cfg(feature = "metrics")]
    pub(super) fn operation(&self) -> &'static str {
        match self.name {
            "ACQUIRE" => "acquire",
            "ACQUIRE_GROUP" => "acquire_group",
            "RELEASE_GROUP" => "release_group",
            "RENEW_GROUP" => "renew_group",
            "POLL" => "poll",
            "RENEW" => "renew",
            "RENEW_SHARE" => "renew_share",
            "RELEASE" => "release",
            "HAND_OFF" => "hand_off",
            "RELEASE_SHARE" => "release_share",
            "PASS" => "pass",
            "CONVERT" => "convert",
            "ABANDON" => "abandon",
            "REPLICATE" => "replicate",
            "RAISE" => "raise",
            "MARKER" => "marker",
            "FREE" => "free",
            "INSPECT" => "inspect",
            "REVOKE" => "revoke",
            _ => "other",
        }
    }

    /// Returns whether the reply never confirms that a lock is held. A quarantined server may run
    /// such a script.
    pub(super) fn is_harmless(&self) -> bool {
        matches!(
            self.name,
            "RELEASE"
                | "RELEASE_GROUP"
                | "RELEASE_SHARE"
                | "ABANDON"
                | "INSPECT"
                | "REVOKE"
                | "INTRODUCE"
                | "NAMES"
        )
    }
}

/// A call of a script, in one allocation. It becomes a command when it is sent on its own.
#[derive(Clone)]
pub(super) struct Call {
    pub(super) script: &'static Script,
    /// The number of arguments that are keys.
    keys: usize,
    /// The keys, then the other arguments.
    bytes: Vec<u8>,
    /// The end of each argument.
    ends: SmallVec<[u32; 12]>,
}

impl Call {
    /// Begins a call with the given number of keys, which precede all other arguments.
    pub(super) fn new(script: &'static Script, keys: usize) -> Self {
        Self::with_capacity(script, keys, 256)
    }

    /// The same, with space for the given number of bytes.
    pub(super) fn with_capacity(script: &'static Script, keys: usize, bytes: usize) -> Self {
        Self {
            script,
            keys,
            bytes: Vec::with_capacity(bytes),
            ends: SmallVec::new(),
        }
    }

    pub(super) fn is_of(&self, script: &Script) -> bool {
        std::ptr::eq(self.script, script)
    }

    /// Returns the command by the script's digest.
    pub(super) fn command(&self) -> Cmd {
        self.by("EVALSHA", &self.script.digest)
    }

    /// Returns the command by the script's text, which the server then caches.
    pub(super) fn by_text(&self) -> Cmd {
        self.by("EVAL", self.script.body)
    }

    fn by(&self, name: &str, script: &str) -> Cmd {
        let size = name.len() + script.len() + self.bytes.len();
        let mut command = Cmd::with_capacity(3 + self.ends.len(), size + 8);
        command.arg(name).arg(script).arg(self.keys);
        for index in 0..self.ends.len() {
            command.arg(self.get(index));
        }
        command
    }

    /// Returns an argument, and nothing for one that is missing.
    fn get(&self, index: usize) -> &[u8] {
        let end = |index: usize| self.ends.get(index).map(|end| *end as usize);
        let begin = index.checked_sub(1).and_then(end).unwrap_or_default();
        let end = end(index).unwrap_or(begin);
        self.bytes.get(begin..end).unwrap_or_default()
    }

    pub(super) fn keys(&self) -> usize {
        self.keys
    }

    pub(super) fn key(&self, index: usize) -> &[u8] {
        self.get(index)
    }

    /// Returns an argument that is not a key.
    pub(super) fn argument(&self, index: usize) -> &[u8] {
        self.get(self.keys + index)
    }

    #[expect(
        clippy::cast_possible_truncation,
        reason = "a call is much smaller than 4 GiB, as a group is bounded"
    )]
    fn push(&mut self, pieces: &[&[u8]]) {
        for piece in pieces {
            self.bytes.extend_from_slice(piece);
        }
        self.ends.push(self.bytes.len() as u32);
    }

    pub(super) fn arg(mut self, arg: impl AsRef<[u8]>) -> Self {
        self.push(&[arg.as_ref()]);
        self
    }

    /// Adds arguments of other calls.
    pub(super) fn args<'a>(mut self, args: impl IntoIterator<Item = &'a [u8]>) -> Self {
        for arg in args {
            self.push(&[arg]);
        }
        self
    }

    /// Adds one key of a lock.
    pub(super) fn name(mut self, names: &Names, part: KeyPart) -> Self {
        self.push(&names.of(part).map(str::as_bytes));
        self
    }

    /// Adds the keys of a lock.
    pub(super) fn names(mut self, names: &Names) -> Self {
        for part in [KeyPart::Lock, KeyPart::Fence, KeyPart::Queue] {
            self.push(&names.of(part).map(str::as_bytes));
        }
        self
    }

    pub(super) fn number(mut self, number: u64) -> Self {
        // Writing to a vector does not fail.
        let _ = write!(self.bytes, "{number}");
        self.push(&[]);
        self
    }

    /// Adds the mode and the member of a hold.
    pub(super) fn hold(self, hold: &Hold) -> Self {
        let call = match hold.mode {
            Mode::Exclusive => self.arg("exclusive"),
            Mode::Shared => self.arg("shared"),
            Mode::Permits(permits) => self.number(permits.get().into()),
        };
        call.member(hold.mode, hold.token)
    }

    /// Adds an exclusive holder.
    pub(super) fn token(self, token: Token) -> Self {
        self.member(Mode::Exclusive, token)
    }

    /// Adds a holder. With permits the member contains their number, so that another number is
    /// detected while a permit is held.
    pub(super) fn member(mut self, mode: Mode, token: Token) -> Self {
        match mode {
            Mode::Permits(permits) => {
                let permits = permits.to_string();
                self.push(&[permits.as_bytes(), b":", &token.to_hex()]);
                self
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
        const MOST: u64 = 1_000_000_000_000;
        let millis = duration.as_nanos().div_ceil(1_000_000);
        self.number(u64::try_from(millis).map_or(MOST, |millis| millis.min(MOST)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::pushes::MOST_RESERVED;
    use crate::store::{
        ENTRY_STALE_AFTER, ENTRY_TTL, HANDOFF_LEASE, MAX_PROPOSAL_SKEW, POLL_INTERVAL,
    };

    #[test]
    fn the_line_keeps_the_times_of_the_contract() {
        let [stale_after, ttl, handoff] =
            [ENTRY_STALE_AFTER, ENTRY_TTL, HANDOFF_LEASE].map(|time| time.as_millis());
        let names = "ENTRY_STALE_AFTER, ENTRY_TTL, HANDOFF_LEASE";
        let times = format!("local {names} = {stale_after}, {ttl}, {handoff}\n");
        let poll_interval = format!("local POLL_INTERVAL = {}\n", POLL_INTERVAL.as_millis());
        let reserved = format!("local MOST_RESERVED = {MOST_RESERVED}\n");
        for line in [times, poll_interval, reserved] {
            assert!(include_str!("lua/line.lua").contains(&line), "{line}");
        }
        let heir = include_str!("lua/hand_off_free.lua");
        for (argument, most) in [(3, handoff), (4, MOST_RESERVED.into())] {
            let bounded = format!("math.min(tonumber(ARGV[{argument}]), {most})");
            assert!(heir.contains(&bounded), "{bounded}");
        }
        let skew = format!("micros + {})", MAX_PROPOSAL_SKEW.as_micros());
        for script in [heir, include_str!("lua/hand_off.lua")] {
            assert!(script.contains(&skew), "{skew}");
        }
    }
}

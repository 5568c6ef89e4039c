//! The scripts that run inside the server, one per operation, and how a call of one is written.
//!
//! A script is sent by its digest. A server that has forgotten it (a restart, a failover, `SCRIPT FLUSH`) says so
//! before anything ran, and gets its text once; `SCRIPT LOAD` would need every node of a cluster.

use std::{fmt, sync::LazyLock, time::Duration};

use redis::Cmd;

use super::names::Names;
use crate::{
    spec::{Family, Mode},
    store::{Hold, Token},
};

/// A script and its SHA-1, by which the server knows it.
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
    /// Grants all or none; a single request may stand in line.
    ACQUIRE = "acquire_free" "clock" "fence" "holders" "standing" "line" "acquire";
    /// Does the token hold, or does it wait?
    POLL = "clock" "fence" "holders" "standing" "line" "poll";
    /// Keeps a writer's lock for longer.
    RENEW = "renew";
    /// Keeps a share for longer.
    RENEW_SHARE = "clock" "holders" "standing" "renew_share";
    /// Gives a writer's lock back, and hands it over or keeps it for nobody.
    RELEASE = "release" "clock" "fence" "holders" "standing" "line" "hand_over";
    /// Gives a share back, and may keep it for nobody.
    RELEASE_SHARE = "clock" "fence" "holders" "standing" "line" "release_share";
    /// Gives back and takes up again, or stands in line.
    PASS = "clock" "fence" "holders" "standing" "line" "pass";
    /// Makes a writer a reader.
    CONVERT = "clock" "fence" "holders" "standing" "line" "convert";
    /// Gives up whatever is held or waited for.
    ABANDON = "clock" "fence" "holders" "standing" "line" "abandon";
    /// Writes something about a grant, for the replicas.
    REPLICATE = "clock" "holders" "standing" "replicate";
    /// Makes the next fencing token larger, and gives the number before it away.
    RAISE = "clock" "fence" "raise";
    /// Since when does the server have its data?
    MARKER = "clock" "marker";
    /// Gives back what the token may hold, by the key of the lock alone.
    FREE = "clock" "holders" "free";
    /// Who holds, and who waits?
    INSPECT = "clock" "fence" "holders" "standing" "line" "inspect";
    /// Takes away.
    REVOKE = "clock" "fence" "holders" "standing" "line" "revoke";
}

impl Script {
    fn new(name: &'static str, body: &'static str) -> Self {
        Self {
            name,
            body,
            digest: redis::Script::new(body).get_hash().to_owned(),
        }
    }

    /// Does it tell nobody that a lock is held? That much a server may do that has forgotten who holds it.
    fn is_harmless(&self) -> bool {
        matches!(
            self.name,
            "RELEASE" | "RELEASE_SHARE" | "ABANDON" | "INSPECT" | "REVOKE"
        )
    }

    /// The same call by the script's text, which the server then remembers.
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

/// One call of a script, by its digest. Written straight into the command: renewals are many.
pub(super) struct Call {
    script: &'static Script,
    command: Cmd,
}

impl Call {
    /// A call with so many `keys`, which come before all other words.
    pub(super) fn new(script: &'static Script, keys: usize) -> Self {
        let mut command = Cmd::with_capacity(3 + keys + 4, 256);
        command.arg("EVALSHA").arg(&script.digest).arg(keys);
        Self { script, command }
    }

    pub(super) fn arg(mut self, arg: impl AsRef<[u8]>) -> Self {
        self.command.arg(arg.as_ref());
        self
    }

    /// The keys of a lock.
    pub(super) fn names(self, names: Names) -> Self {
        self.arg(names.lock).arg(names.fence).arg(names.queue)
    }

    pub(super) fn number(self, number: u32) -> Self {
        self.arg(number.to_string())
    }

    /// How a lock is held, and by whom.
    pub(super) fn hold(self, hold: &Hold) -> Self {
        let mode = match hold.mode {
            Mode::Exclusive => "exclusive",
            Mode::Shared => "shared",
            Mode::Permits(permits) => {
                return self.arg(permits.to_string()).member(hold.mode, hold.token);
            }
        };
        self.arg(mode).member(hold.mode, hold.token)
    }

    /// An exclusive holder.
    pub(super) fn token(self, token: Token) -> Self {
        self.member(Mode::Exclusive, token)
    }

    /// A holder. With permits their number is in it, so that another number is noticed while somebody holds.
    pub(super) fn member(self, mode: Mode, token: Token) -> Self {
        match mode {
            Mode::Permits(permits) => {
                self.arg([permits.to_string().as_bytes(), b":", &token.to_hex()].concat())
            }
            Mode::Exclusive | Mode::Shared => self.arg(token.to_hex()),
        }
    }

    pub(super) fn family(self, family: Family) -> Self {
        self.arg(match family {
            Family::Lock => "lock",
            Family::Permits => "permits",
        })
    }

    /// In whole milliseconds, rounded up: a lease is at least what was asked. Bounded, so that the server can add its time.
    pub(super) fn millis(self, duration: Duration) -> Self {
        const MOST: u128 = 1_000_000_000_000;
        self.arg(
            duration
                .as_nanos()
                .div_ceil(1_000_000)
                .min(MOST)
                .to_string(),
        )
    }

    /// The call by the script's text.
    pub(super) fn into_text(self) -> Cmd {
        self.script.by_text(&self.command)
    }

    /// See [`Script::is_harmless`].
    pub(super) fn is_harmless(&self) -> bool {
        self.script.is_harmless()
    }

    /// The first of its keys.
    pub(super) fn key(&self) -> &[u8] {
        const KEY: usize = 3;
        match self.command.args_iter().nth(KEY) {
            Some(redis::Arg::Simple(key)) => key,
            _ => &[],
        }
    }

    pub(super) fn parts(&self) -> (&'static Script, &Cmd) {
        (self.script, &self.command)
    }

    pub(super) fn into_parts(self) -> (&'static Script, Cmd) {
        (self.script, self.command)
    }
}

// Arguments hold tokens.
impl fmt::Debug for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Call")
            .field("script", &self.script.name)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use crate::store::{FORGOTTEN, HANDED_OVER, LONGEST_POLL, STALE};

    #[test]
    fn the_line_keeps_the_times_of_the_contract() {
        let [stale, forgotten, handed_over] =
            [STALE, FORGOTTEN, HANDED_OVER].map(|time| time.as_millis());
        let times =
            format!("local STALE, FORGOTTEN, HANDED_OVER = {stale}, {forgotten}, {handed_over}\n");
        let longest_poll = format!("local LONGEST_POLL = {}\n", LONGEST_POLL.as_millis());
        for line in [times, longest_poll] {
            assert!(include_str!("lua/line.lua").contains(&line), "{line}");
        }
    }
}

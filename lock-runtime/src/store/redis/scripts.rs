//! The scripts that run inside the server, one per operation, and how a call of one is written.
//!
//! A script is sent by its digest. A server that has forgotten it (a restart, a failover, `SCRIPT FLUSH`) says so
//! before anything ran, and gets its text once; `SCRIPT LOAD` would need every node of a cluster.

use std::{fmt, sync::LazyLock, time::Duration};

use redis::Cmd;

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
    /// Grants all or none.
    ACQUIRE = "clock" "fence" "holders" "standing" "acquire";
    /// Does the token hold?
    POLL = "clock" "fence" "holders" "standing" "poll";
    /// Keeps for longer.
    RENEW = "clock" "holders" "standing" "renew";
    /// Gives back, and may keep for nobody.
    RELEASE = "clock" "holders" "release";
    /// Gives back and takes up again.
    PASS = "clock" "fence" "holders" "pass";
    /// Makes a writer a reader.
    CONVERT = "clock" "fence" "holders" "standing" "convert";
    /// Who holds?
    INSPECT = "clock" "fence" "holders" "inspect";
    /// Takes away.
    REVOKE = "clock" "holders" "revoke";
}

impl Script {
    fn new(name: &'static str, body: &'static str) -> Self {
        Self { name, body, digest: redis::Script::new(body).get_hash().to_owned() }
    }
}

/// One call of a script.
pub(super) struct Call {
    script: &'static Script,
    keys: Vec<String>,
    args: Vec<String>,
}

impl Call {
    pub(super) fn new(script: &'static Script) -> Self {
        Self { script, keys: Vec::new(), args: Vec::new() }
    }

    pub(super) fn key(mut self, key: impl Into<String>) -> Self {
        self.keys.push(key.into());
        self
    }

    pub(super) fn arg(mut self, arg: impl Into<String>) -> Self {
        self.args.push(arg.into());
        self
    }

    /// How a lock is held, and by whom.
    pub(super) fn hold(self, hold: &Hold) -> Self {
        self.arg(mode(hold.mode)).arg(member(hold.mode, hold.token))
    }

    /// An exclusive holder.
    pub(super) fn token(self, token: Token) -> Self {
        self.arg(member(Mode::Exclusive, token))
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
        self.arg(duration.as_nanos().div_ceil(1_000_000).min(MOST).to_string())
    }

    /// By its digest.
    pub(super) fn evalsha(&self) -> Cmd {
        self.command("EVALSHA", &self.script.digest)
    }

    /// By its text, which the server then remembers.
    pub(super) fn eval(&self) -> Cmd {
        self.command("EVAL", self.script.body)
    }

    fn command(&self, verb: &str, script: &str) -> Cmd {
        let mut command = redis::cmd(verb);
        command.arg(script).arg(self.keys.len()).arg(&self.keys).arg(&self.args);
        command
    }
}

// Arguments hold tokens.
impl fmt::Debug for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Call").field("script", &self.script.name).field("keys", &self.keys).finish_non_exhaustive()
    }
}

/// How scripts call a mode.
fn mode(mode: Mode) -> String {
    match mode {
        Mode::Exclusive => "exclusive".into(),
        Mode::Shared => "shared".into(),
        Mode::Permits(permits) => permits.to_string(),
    }
}

/// How a holder is written. With permits their number is in it, so that another number is noticed while somebody holds.
fn member(mode: Mode, token: Token) -> String {
    let mut member = String::with_capacity(48);
    if let Mode::Permits(permits) = mode {
        member.push_str(&permits.to_string());
        member.push(':');
    }
    member.extend(token.to_hex().map(char::from));
    member
}

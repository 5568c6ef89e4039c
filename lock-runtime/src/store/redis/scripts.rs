//! The scripts that run inside the server, one per operation, and how a call of one is written.
//!
//! A script is sent by its digest. A server that has forgotten it (a restart, a failover, `SCRIPT FLUSH`) says so
//! before anything ran, and gets its text once; `SCRIPT LOAD` would need every node of a cluster.

use std::{fmt, sync::LazyLock};

use redis::Cmd;

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

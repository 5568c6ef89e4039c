//! The scripts that run on the server, one per operation, and the encoding of their calls.
//!
//! A script is called by its digest. A server that does not know it (after a restart, a failover
//! or `SCRIPT FLUSH`) reports that before anything ran, and is sent the text once. `SCRIPT LOAD`
//! would have to be sent to every node of a cluster.

mod acquire;
mod calls;
pub(super) mod groups;
pub(super) mod names;
pub(super) mod reply;

use std::{
    borrow::Cow,
    io::Write as _,
    sync::{LazyLock, Mutex},
    time::Duration,
};

use redis::Cmd;
use smallvec::SmallVec;

use self::names::Names;
use crate::{
    guard::fence::FencingToken,
    request::spec::{LockKind, Mode},
    shell::sync::lock,
    store::{Hold, KeyPart, Token},
};

/// The script of an operation.
pub(crate) struct Script {
    in_quarantine: InQuarantine,
    /// The name of the operation in metrics.
    #[cfg_attr(not(any(test, feature = "metrics")), expect(dead_code))]
    pub(crate) operation: &'static str,
    text: Text,
    /// The texts for other lives of fencing tokens. There are few of them in a process, and they
    /// last as long as it does.
    others: Mutex<Vec<(Duration, &'static Text)>>,
}

/// The treatment of a script on a quarantined server.
#[derive(Clone, Copy, PartialEq, Eq)]
enum InQuarantine {
    /// The reply may confirm that a lock is held, so the script is not run.
    Votes,
    /// The reply never confirms that.
    Harmless,
}

/// The text of a script and its SHA-1, by which the server identifies it.
struct Text {
    body: Cow<'static, str>,
    digest: String,
}

impl Text {
    fn new(body: Cow<'static, str>) -> Self {
        let digest = redis::Script::new(&body).get_hash().to_owned();
        Self { body, digest }
    }
}

macro_rules! scripts {
    ($($(#[$doc:meta])* $script:ident($in_quarantine:ident, $operation:literal) = $($part:literal)+;)+) => {$(
        $(#[$doc])*
        pub(crate) static $script: LazyLock<Script> = LazyLock::new(|| Script {
            in_quarantine: InQuarantine::$in_quarantine,
            operation: $operation,
            text: Text::new(concat!($(include_str!(concat!("lua/", $part, ".lua"))),+).into()),
            others: Mutex::default(),
        });
    )+};
}

// Each with its treatment in quarantine, and the name of its operation in metrics.
scripts! {
    /// Grants all locks or none. A single request may enter the wait queue.
    ACQUIRE(Votes, "acquire") = "is_done" "acquire_free" "clock" "fence" "holders" "standing" "line" "acquire";
    /// Grants free exclusive locks to several requests.
    ACQUIRE_GROUP(Votes, "acquire_group") = "is_done" "acquire_group";
    /// Releases the locks of several writers.
    RELEASE_GROUP(Harmless, "release_group") = "release_group";
    /// Records the results of several writers, and releases their locks.
    RECORD_GROUP(Harmless, "record_group") = "done" "record_group";
    /// Extends the leases of several writers.
    RENEW_GROUP(Votes, "renew_group") = "renew_group";
    /// Returns whether the token holds or waits.
    POLL(Votes, "poll") = "clock" "fence" "holders" "standing" "line" "poll";
    /// Extends a writer's lease.
    RENEW(Votes, "renew") = "renew";
    /// Extends the lease of a share.
    RENEW_SHARE(Votes, "renew_share") = "clock" "holders" "standing" "renew_share";
    /// Releases a writer's lock, and hands it off or reserves it.
    RELEASE(Harmless, "release") = "refusal" "done" "release" "clock" "fence" "holders" "standing" "line" "hand_over";
    /// Releases a share, and may reserve it.
    RELEASE_SHARE(Harmless, "release_share") = "release_share_free" "clock" "fence" "holders" "standing" "line" "release_share";
    /// Releases a lock and acquires it under another token, or queues that token.
    PASS(Votes, "pass") = "clock" "fence" "holders" "standing" "line" "pass";
    /// Converts a writer into a reader.
    CONVERT(Votes, "convert") = "clock" "fence" "holders" "standing" "line" "convert";
    /// Abandons a token, which may hold or wait.
    ABANDON(Harmless, "abandon") = "clock" "fence" "holders" "standing" "line" "abandon";
    /// Writes to a key of a grant, for the replicas.
    REPLICATE(Votes, "replicate") = "clock" "holders" "standing" "replicate";
    /// Raises the next fencing token above a number, and gives that number to the caller.
    RAISE(Votes, "raise") = "clock" "fence" "raise";
    /// Returns the marker of the server's data, and its age.
    MARKER(Votes, "marker") = "clock" "marker";
    /// Releases the lock that a token may hold, by the key of the lock alone.
    FREE(Votes, "free") = "clock" "holders" "done" "free";
    /// Returns the result of a lock that is done.
    RESULT(Votes, "result") = "is_done" "result";
    /// Returns the holders and the waiters.
    INSPECT(Harmless, "inspect") = "clock" "fence" "holders" "standing" "line" "holder_id" "inspect";
    /// Returns the commands that the user may not run.
    RIGHTS(Votes, "other") = "rights";
    /// Revokes a lock.
    REVOKE(Harmless, "revoke") = "clock" "fence" "holders" "standing" "line" "holder_id" "revoke";
    /// Records the name of a client.
    INTRODUCE(Harmless, "other") = "introduce";
    /// Returns the names of clients.
    NAMES(Harmless, "other") = "names";
    /// Records since when a client holds readers' locks and permits.
    SINCE(Harmless, "other") = "clock" "since";
    /// Returns since when readers and permits hold their locks.
    AGES(Harmless, "inspect") = "clock" "ages";
}

impl Script {
    /// The text that keeps fencing tokens for this long after their grants.
    fn keeping(&self, fences: Duration) -> &Text {
        if fences == FencingToken::KEPT_FOR {
            return &self.text;
        }
        let mut others = lock(&self.others);
        let known = others.iter().find(|(kept_for, _)| *kept_for == fences);
        if let Some((_, text)) = known {
            return text;
        }
        let [usual, other] = [FencingToken::KEPT_FOR, fences].map(|it| {
            let (seconds, millis) = (it.as_secs(), it.as_millis());
            [format!("'EX', {seconds})"), format!(", {millis})")]
        });
        let mut body = self.text.body.to_string();
        for (usual, other) in usual.iter().zip(&other) {
            body = body.replace(usual, other);
        }
        let text: &'static Text = Box::leak(Box::new(Text::new(body.into())));
        others.push((fences, text));
        text
    }

    /// Returns whether a quarantined server may run the script.
    pub(crate) fn is_harmless(&self) -> bool {
        self.in_quarantine == InQuarantine::Harmless
    }
}

/// An argument that a group of calls takes from each of them. Where it stands is recorded as the
/// call is written, so a script may gain arguments.
#[derive(Clone, Copy)]
pub(crate) enum Field {
    Deadline,
    Mode,
    Member,
    Lease,
    Reserved,
    Marker,
    Proposal,
    /// The duration of a reservation.
    Keep,
    /// The fencing token under which a result was made.
    Fence,
    Result,
    /// The longest time left of a lease.
    AtMost,
}

/// A call of a script, in one allocation. It becomes a command when it is sent on its own.
#[derive(Clone)]
pub(crate) struct Call {
    pub(crate) script: &'static Script,
    /// The number of each field among the arguments. 0 if it has none, as a key comes first.
    fields: [u8; Field::AtMost as usize + 1],
    /// The number of arguments that are keys.
    keys: usize,
    /// The keys, then the other arguments.
    bytes: Vec<u8>,
    /// The end of each argument.
    ends: SmallVec<[u32; 12]>,
}

impl Call {
    /// Begins a call with the given number of keys, which precede all other arguments.
    pub(crate) fn new(script: &'static Script, keys: usize) -> Self {
        Self::with_capacity(script, keys, 256)
    }

    /// The same, with space for the given number of bytes.
    pub(crate) fn with_capacity(script: &'static Script, keys: usize, bytes: usize) -> Self {
        Self {
            script,
            fields: Default::default(),
            keys,
            bytes: Vec::with_capacity(bytes),
            ends: SmallVec::new(),
        }
    }

    pub(super) fn is_of(&self, script: &Script) -> bool {
        std::ptr::eq(self.script, script)
    }

    /// Returns the command by the digest of the script that keeps `fences` for this long.
    pub(crate) fn command(&self, fences: Duration) -> Cmd {
        self.by("EVALSHA", &self.script.keeping(fences).digest)
    }

    /// Returns the command by the text of the script, which the server then caches.
    pub(crate) fn by_text(&self, fences: Duration) -> Cmd {
        self.by("EVAL", &self.script.keeping(fences).body)
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

    /// Returns the text of the script, and the arguments after the keys.
    #[cfg(all(test, feature = "records"))]
    pub(super) fn parts(&self) -> (&'static str, Vec<&[u8]>) {
        let script: &'static Script = self.script;
        let args = (self.keys..self.ends.len()).map(|index| self.get(index));
        (&script.text.body, args.collect())
    }

    /// Returns an argument, and nothing for one that is missing.
    fn get(&self, index: usize) -> &[u8] {
        let end = |index: usize| self.ends.get(index).map(|end| *end as usize);
        let begin = index.checked_sub(1).and_then(end).unwrap_or_default();
        let end = end(index).unwrap_or(begin);
        self.bytes.get(begin..end).unwrap_or_default()
    }

    pub(crate) fn keys(&self) -> usize {
        self.keys
    }

    pub(crate) fn key(&self, index: usize) -> &[u8] {
        self.get(index)
    }

    /// Returns the argument that is marked as this field, and nothing if there is none.
    pub(crate) fn field(&self, field: Field) -> &[u8] {
        match self.fields[field as usize] {
            0 => b"",
            index => self.get(index.into()),
        }
    }

    /// Marks the next argument as this field.
    pub(super) fn mark(mut self, field: Field) -> Self {
        // Only calls with few arguments are sent in groups.
        self.fields[field as usize] = u8::try_from(self.ends.len()).unwrap_or_default();
        self
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

    pub(crate) fn arg(mut self, arg: impl AsRef<[u8]>) -> Self {
        self.push(&[arg.as_ref()]);
        self
    }

    /// Adds arguments of other calls.
    pub(crate) fn args<'a>(mut self, args: impl IntoIterator<Item = &'a [u8]>) -> Self {
        for arg in args {
            self.push(&[arg]);
        }
        self
    }

    /// Adds one key of a lock.
    pub(crate) fn name(mut self, names: &Names, part: KeyPart) -> Self {
        self.push(&names.of(part).map(str::as_bytes));
        self
    }

    /// Adds the keys of a lock.
    pub(crate) fn names(mut self, names: &Names) -> Self {
        for part in [KeyPart::Lock, KeyPart::Fence, KeyPart::Queue] {
            self.push(&names.of(part).map(str::as_bytes));
        }
        self
    }

    pub(crate) fn number(mut self, number: u64) -> Self {
        // Writing to a vector does not fail.
        let _ = write!(self.bytes, "{number}");
        self.push(&[]);
        self
    }

    /// Adds the mode and the member of a hold.
    pub(crate) fn hold(self, hold: &Hold) -> Self {
        let call = self.mark(Field::Mode);
        let call = match hold.mode {
            Mode::Exclusive => call.arg("exclusive"),
            Mode::Shared => call.arg("shared"),
            Mode::Permits(permits) => call.number(permits.get().into()),
        };
        let call = call.mark(Field::Member);
        call.member(hold.mode, hold.token)
    }

    /// Adds an exclusive holder.
    pub(crate) fn token(self, token: Token) -> Self {
        self.member(Mode::Exclusive, token)
    }

    /// Adds a holder. With permits the member contains their number, so that another number is
    /// detected while a permit is held.
    pub(crate) fn member(mut self, mode: Mode, token: Token) -> Self {
        match mode {
            Mode::Permits(permits) => {
                let permits = permits.to_string();
                self.push(&[permits.as_bytes(), b":", &token.to_hex()]);
                self
            }
            Mode::Exclusive | Mode::Shared => self.arg(token.to_hex()),
        }
    }

    pub(crate) fn kind(self, kind: LockKind) -> Self {
        self.arg(match kind {
            LockKind::Lock => "lock",
            LockKind::Permits => "permits",
        })
    }

    /// Adds a duration in whole milliseconds, rounded up, as a lease must last as long as
    /// requested. The value is bounded, so that the server can add its time.
    pub(crate) fn millis(self, duration: Duration) -> Self {
        const MOST: u64 = 1_000_000_000_000;
        let millis = duration.as_nanos().div_ceil(1_000_000);
        self.number(u64::try_from(millis).map_or(MOST, |millis| millis.min(MOST)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Grant, MAX_PROPOSAL_SKEW, MOST_RESERVED, Waiter};

    /// Each place in which a script has the usual time.
    #[test]
    fn fencing_tokens_are_kept_for_another_time() {
        let minute = Duration::from_secs(60);
        let scripts: [&LazyLock<Script>; 10] = [
            &super::ACQUIRE,
            &super::ACQUIRE_GROUP,
            &super::POLL,
            &super::RELEASE,
            &super::RELEASE_SHARE,
            &super::PASS,
            &super::CONVERT,
            &super::ABANDON,
            &super::REPLICATE,
            &super::RAISE,
        ];
        for script in scripts {
            let (usual, other) = (&script.text, script.keeping(minute));
            assert!(usual.body.contains("86400"), "{}", script.operation);
            assert!(!other.body.contains("86400"), "{}", script.operation);
            assert!(other.body.contains("60)") || other.body.contains("60000)"));
            assert_ne!(usual.digest, other.digest);
            assert!(std::ptr::eq(other, script.keeping(minute)));
            assert!(std::ptr::eq(usual, script.keeping(FencingToken::KEPT_FOR)));
        }
        for script in [&super::RENEW, &super::INTRODUCE, &super::FREE] {
            assert!(!script.text.body.contains("86400"), "{}", script.operation);
        }
    }

    #[test]
    fn the_line_keeps_the_times_of_the_contract() {
        let [stale_after, ttl, handoff] =
            [Waiter::STALE_AFTER, Waiter::TTL, Grant::HANDOFF_LEASE].map(|time| time.as_millis());
        let names = "ENTRY_STALE_AFTER, ENTRY_TTL, HANDOFF_LEASE";
        let times = format!("local {names} = {stale_after}, {ttl}, {handoff}\n");
        let poll_interval = format!(
            "local POLL_INTERVAL = {}\n",
            Waiter::POLL_INTERVAL.as_millis()
        );
        let reserved = format!("local MOST_RESERVED = {MOST_RESERVED}\n");
        for line in [times, poll_interval, reserved] {
            assert!(include_str!("lua/line.lua").contains(&line), "{line}");
        }
        let skew = format!("micros + {})", MAX_PROPOSAL_SKEW.as_micros());
        for script in [
            include_str!("lua/acquire.lua"),
            include_str!("lua/acquire_free.lua"),
            include_str!("lua/acquire_group.lua"),
        ] {
            assert!(script.contains(&skew), "{skew}");
        }
    }
}

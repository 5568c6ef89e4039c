//! What is said to a store, and what it answers.

use std::{fmt, time::Duration};

use tokio::time::Instant;

use crate::{fence::FencingToken, key::LockKey, spec::Mode};

/// The random 128-bit name of one acquisition. It is used once and dies with it, and is nobody else's to know.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(u128);

impl Token {
    /// A fresh token.
    pub fn random() -> Self {
        Self(rand::random())
    }

    /// One of the other names of an acquisition that needs several, by number. They share their [`stem`](Self::stem).
    pub(crate) fn alias(self, number: u16) -> Self {
        let Self(bits) = self;
        let end = (bits as u16).wrapping_add(number);
        Self(bits >> 16 << 16 | u128::from(end))
    }

    /// What all names of an acquisition begin with.
    pub(crate) fn stem(self) -> u128 {
        self.0 >> 16
    }

    /// The token as a store keeps it: 32 lower-case hexadecimal digits.
    pub fn to_hex(self) -> [u8; 32] {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let mut text = [0; 32];
        for (place, byte) in text.chunks_exact_mut(2).zip(self.0.to_be_bytes()) {
            place[0] = DIGITS[usize::from(byte >> 4)];
            place[1] = DIGITS[usize::from(byte & 15)];
        }
        text
    }

    /// The token that a store keeps as `text`.
    pub fn from_hex(text: &str) -> Option<Self> {
        let digits = text.len() == 32
            && text
                .bytes()
                .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        digits
            .then(|| u128::from_str_radix(text, 16).ok())
            .flatten()
            .map(Self)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// One acquisition: who (the token) holds or wants what (the key) how (the mode).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Hold {
    /// The lock.
    pub key: LockKey,
    /// How it is held.
    pub mode: Mode,
    /// The acquisition.
    pub token: Token,
}

impl Hold {
    /// The acquisition `token` of `key` in `mode`.
    pub fn new(key: LockKey, mode: Mode, token: Token) -> Self {
        Self { key, mode, token }
    }

    /// The same acquisition before it was converted.
    pub(crate) fn as_writer(&self) -> Self {
        Self {
            mode: Mode::Exclusive,
            ..self.clone()
        }
    }
}

/// Asks for one key.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct KeyRequest {
    /// Who asks for what.
    pub hold: Hold,
    /// How long the store keeps the lock without a renewal.
    pub lease: Duration,
    /// The store must answer [`AcquireReply::Late`] and do nothing if it comes to execute the request after this instant (PROTOCOL 7).
    pub deadline: Instant,
    /// What to do when the lock is not free.
    pub if_busy: IfBusy,
    /// Where the request is refused, its caller asks again to be queued: the refusal need not be the last word on whether the lock
    /// is free.
    pub then_queues: bool,
    /// How many fencing tokens to reserve with the grant, beside its own (see [`Grant::spare`]). Exclusive holds only; a store
    /// may reserve none.
    pub spare: u32,
    /// A reader beside whom this one may come in although others wait: it stood behind that one in the same place of the line. So
    /// readers come in together, and a writer that waits is put off by one group at most. Shared holds only.
    pub beside: Option<Token>,
    /// What the grant's fencing token is to be if the store has not given out a larger one, and if it is not more than
    /// [`FORESIGHT`] ahead of the store's clock: so several stores can answer the same number (PROTOCOL 28). Without it the store's
    /// clock says.
    pub proposal: Option<FencingToken>,
}

impl KeyRequest {
    /// A request that is refused when the lock is not free.
    pub fn new(hold: Hold, lease: Duration, deadline: Instant) -> Self {
        Self {
            hold,
            lease,
            deadline,
            if_busy: IfBusy::Refuse,
            then_queues: false,
            spare: 0,
            beside: None,
            proposal: None,
        }
    }

    /// The same request, which may come in beside the reader `beside`.
    #[must_use]
    pub fn beside(self, beside: Option<Token>) -> Self {
        Self { beside, ..self }
    }

    /// The same request, which proposes its fencing token.
    #[must_use]
    pub fn proposal(self, proposal: Option<FencingToken>) -> Self {
        Self { proposal, ..self }
    }

    /// The same request, which reserves `spare` fencing tokens beside its own.
    #[must_use]
    pub fn spare(self, spare: u32) -> Self {
        Self { spare, ..self }
    }

    /// The same request, which stands in line when the lock is not free.
    #[must_use]
    pub fn queued(self) -> Self {
        Self {
            if_busy: IfBusy::Queue,
            ..self
        }
    }
}

/// What to do when a lock is not free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IfBusy {
    /// Answer [`AcquireReply::Busy`].
    Refuse,
    /// Stand in line, where the store keeps one; a store that keeps none answers `Busy`.
    Queue,
}

/// A lock that is held now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Grant {
    /// Larger than that of every earlier grant of the key.
    pub fence: FencingToken,
    /// What is left of the lease: the whole of it for a first grant, less where a repeated request meets its own grant (PROTOCOL 2),
    /// and at most [`HANDED_OVER`] for a grant from the line.
    pub ttl: Duration,
    /// So many fencing tokens, those after `fence`, are reserved for this grant: nobody is given one of them while it lasts.
    pub spare: u32,
}

/// How long a grant from the line lasts at most, until a renewal confirms it: so a lock that was handed over to somebody who is no
/// longer there comes back soon (PROTOCOL 4).
pub const HANDED_OVER: Duration = Duration::from_secs(3);

/// An entry of the line whose holder has not asked for so long is passed over (PROTOCOL 16).
pub const STALE: Duration = Duration::from_secs(3);

/// An entry of the line whose holder has not asked for so long is removed (PROTOCOL 16).
pub const FORGOTTEN: Duration = Duration::from_secs(10);

/// The longest pause between two polls of a waiter. A store that knows that a lock may be free before its waiters poll again sends
/// them [`StoreEvent::Kept`](super::StoreEvent::Kept).
pub const LONGEST_POLL: Duration = Duration::from_secs(1);

/// How far ahead of a store's clock a proposed fencing token may be: a client whose clock is far ahead must not take the numbers of
/// a year.
pub const FORESIGHT: Duration = Duration::from_secs(60);

impl Grant {
    /// A grant for another `ttl`.
    pub fn new(fence: FencingToken, ttl: Duration) -> Self {
        Self {
            fence,
            ttl,
            spare: 0,
        }
    }

    /// The same grant, with `spare` fencing tokens reserved after its own.
    #[must_use]
    pub fn spare(self, spare: u32) -> Self {
        Self { spare, ..self }
    }
}

/// A key in which a store keeps a part of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeyPart {
    /// Its holders.
    Lock,
    /// Its latest fencing token.
    Fence,
    /// Its wait queue.
    Queue,
}

/// The answer to [`Store::acquire`](super::Store::acquire).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AcquireReply {
    /// The lock is held by the request's token. A repeated request gets the same grant; a shared one may get a larger fencing token with it.
    Granted(Grant),
    /// The request stands in line. `counter` is the key's latest fencing token: a pushed grant counts only if its own is larger (PROTOCOL 3).
    Queued {
        /// The latest fencing token of the key, where there is one.
        counter: Option<FencingToken>,
        /// What is left of the holder's lease, where it is known.
        holder_ttl: Option<Duration>,
    },
    /// Not free, and not queued.
    Busy {
        /// What is left of the holder's lease, where it is known.
        holder_ttl: Option<Duration>,
        /// Whether another request waits for the lock.
        has_waiters: bool,
    },
    /// The deadline had passed when the request came to be executed; nothing was done.
    Late,
    /// Other data lie in the place of this key of the lock, untouched.
    ForeignKey(KeyPart),
    /// Held with another number of permits, or in a form that this mode cannot read.
    ModeMismatch,
}

/// The answer to [`Store::acquire_all`](super::Store::acquire_all).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AcquireAllReply {
    /// All are held: a grant for each request, in their order.
    Granted(Vec<Grant>),
    /// None is held; this is the answer to the request at `index`, the first that could not be granted.
    Refused {
        /// Which request.
        index: usize,
        /// Its answer; never `Granted` or `Queued`.
        reply: AcquireReply,
    },
}

/// The answer to [`Store::poll`](super::Store::poll).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PollReply {
    /// Held, with what is left of the lease. For a shared hold the fencing token may be a fresh, larger one.
    Granted(Grant),
    /// Still in line.
    Queued {
        /// The latest fencing token of the key, where there is one.
        counter: Option<FencingToken>,
        /// What is left of the holder's lease, where it is known.
        holder_ttl: Option<Duration>,
    },
    /// Neither held nor in line.
    Gone,
}

/// Asks to keep one lock for another `lease` from now.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Renewal {
    /// The acquisition.
    pub hold: Hold,
    /// The lock is kept for at least so long from now; zero asks and changes nothing.
    pub lease: Duration,
}

impl Renewal {
    /// Keeps `hold` for at least `lease` from now.
    pub fn new(hold: Hold, lease: Duration) -> Self {
        Self { hold, lease }
    }
}

/// The answer to one [`Renewal`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RenewReply {
    /// Held for so long from now.
    Renewed {
        /// What is left of the lease, which is more than was asked if it had been longer.
        ttl: Duration,
    },
    /// No longer held. It stays so: a renewal never creates.
    Gone,
}

/// Gives a lock back.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Release {
    /// The acquisition.
    pub hold: Hold,
    /// Keep the lock for nobody until so long from now (`min_hold`).
    pub keep_for: Option<Duration>,
    /// Take the lock up again in the same step, or stand at the end of the line if there is one. Exclusive holds only; instead
    /// of `keep_for`.
    pub next: Option<Next>,
}

/// Who takes up a lock again that is given back in the same step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Next {
    /// The acquisition: a fresh token.
    pub token: Token,
    /// Its lease.
    pub lease: Duration,
    /// How many fencing tokens to reserve for it, as in [`KeyRequest::spare`].
    pub spare: u32,
}

impl Next {
    /// Takes the lock up again under `token`.
    pub fn new(token: Token, lease: Duration, spare: u32) -> Self {
        Self {
            token,
            lease,
            spare,
        }
    }
}

impl Release {
    /// Gives `hold` back.
    pub fn new(hold: Hold) -> Self {
        Self {
            hold,
            keep_for: None,
            next: None,
        }
    }

    /// Keeps the lock for nobody until `keep_for` from now.
    #[must_use]
    pub fn keep_for(self, keep_for: Option<Duration>) -> Self {
        Self { keep_for, ..self }
    }

    /// Takes the lock up again for `next`, or puts it in line.
    #[must_use]
    pub fn next(self, next: Next) -> Self {
        Self {
            next: Some(next),
            ..self
        }
    }
}

/// The answer to [`Store::release`](super::Store::release).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReleaseReply {
    /// Given back.
    Released,
    /// Given back, and held again by `next`.
    Passed(Grant),
    /// Given back and handed over to whoever was first in line; `next` stands in line.
    Queued {
        /// The latest fencing token of the key, where there is one.
        counter: Option<FencingToken>,
        /// What is left of the new holder's lease, where it is known.
        holder_ttl: Option<Duration>,
    },
    /// The token did not hold the lock; nothing was done.
    NotHeld,
}

/// The reply to [`Store::raise`](super::Store::raise).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RaiseReply {
    /// The latest fencing token was smaller, and is the given one now.
    Raised,
    /// The latest fencing token was at least as large; nothing has changed.
    NotRaised {
        /// The latest fencing token of the lock.
        latest: FencingToken,
    },
}

/// The answer to [`Store::convert`](super::Store::convert).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConvertReply {
    /// The writer is now a reader under the same token, with the same time left and a fresh fencing token. A repeated request gets the same.
    Converted(Grant),
    /// The token did not hold the lock.
    NotHeld,
}

/// Which locks [`Store::revoke`](super::Store::revoke) takes away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RevokeScope {
    /// Only what has a lease.
    Leased,
    /// Also a lock that somebody set without an expiry.
    AlsoEndless,
}

/// The answer to [`Store::revoke`](super::Store::revoke).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RevokeReply {
    /// Taken away.
    Revoked,
    /// Nobody held it.
    NotHeld,
    /// It has no expiry, so it may not be a lock; it was left untouched.
    Endless,
    /// Other data lie in the place of the lock's key, untouched. [`LockClient::revoke`](crate::LockClient::revoke) makes an error
    /// of it, which names the key.
    ForeignKey,
}

/// What a store knows of a lock at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Inspection {
    /// Who holds it, those that expire first in front. Empty: free.
    pub holders: Vec<Holder>,
    /// Who stands in the store's line, in order. A process has one place in it for all who wait there with the same mode and lease.
    pub waiters: Vec<Waiter>,
    /// The latest fencing token of the key, or the last of those that are reserved for its holder. `None` if there is none: it was not
    /// granted for a day, or, in memory, is not held.
    pub fence: Option<FencingToken>,
}

/// A holder of a lock, as the store sees it. Never its token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// How it is held.
    pub mode: Mode,
    /// What is left of the lease; `None` if it has no expiry.
    pub ttl: Option<Duration>,
}

impl Holder {
    /// A holder with `ttl` left.
    pub fn new(mode: Mode, ttl: Option<Duration>) -> Self {
        Self { mode, ttl }
    }
}

/// A place in the line of a lock, as the store sees it. Never its token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waiter {
    /// How it wants to hold the lock.
    pub mode: Mode,
    /// The lease it asks for.
    pub lease: Duration,
    /// How long ago it asked last. After [`STALE`] it is passed over, after [`FORGOTTEN`] removed.
    pub silent: Duration,
}

impl Waiter {
    /// A place whose holder asked `silent` ago.
    pub fn new(mode: Mode, lease: Duration, silent: Duration) -> Self {
        Self {
            mode,
            lease,
            silent,
        }
    }
}

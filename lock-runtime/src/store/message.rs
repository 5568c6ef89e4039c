//! The requests to a store and its replies.

use std::{
    fmt,
    sync::Arc,
    time::{Duration, SystemTime},
};

use super::identity::{ClientId, HolderId};
use crate::{
    guard::fence::FencingToken, request::key::LockKey, request::spec::Mode, shell::random::random,
    shell::time::Instant,
};

/// The random 128-bit identifier of one acquisition. It is used only once, and must not be
/// disclosed to others.
// Bytes, the highest first: the alignment of a number would enlarge all that contains a token.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token([u8; 16]);

/// The byte whose first digit marks a token whose client may retain the lock, and that digit.
const MARKED: usize = ClientId::BITS as usize / 8;
const RETAINS: u8 = 0xf;

impl Token {
    /// Generates a fresh token of no particular client.
    pub fn random() -> Self {
        Self::from_bits(random()).marked(false)
    }

    fn from_bits(bits: u128) -> Self {
        Self(bits.to_be_bytes())
    }

    fn bits(self) -> u128 {
        u128::from_be_bytes(self.0)
    }

    /// Generates a fresh token of `client`.
    pub fn of(client: ClientId) -> Self {
        let own = u128::BITS - ClientId::BITS;
        let bits = random::<u128>() & (u128::MAX >> ClientId::BITS);
        Self::from_bits(u128::from(client.bits()) << own | bits).marked(false)
    }

    /// Returns the client that generated the token.
    pub fn client(self) -> ClientId {
        ClientId::first_of((self.bits() >> 64) as u64)
    }

    /// Returns the token as one of this client.
    #[cfg(test)]
    pub(crate) fn by(self, client: ClientId) -> Self {
        let own = u128::BITS - ClientId::BITS;
        Self::from_bits(
            u128::from(client.bits()) << own | self.bits() << ClientId::BITS >> ClientId::BITS,
        )
    }

    /// Returns the token with the mark of a client that may retain its lock for the next use, or
    /// without it. A store tells such a client that another one waits for the lock. Clients of
    /// earlier versions draw the digit of the mark at random.
    pub(crate) fn marked(mut self, retains: bool) -> Self {
        let digit = match (retains, self.retains()) {
            (true, _) => RETAINS,
            (false, true) => 0,
            (false, false) => return self,
        };
        self.0[MARKED] = self.0[MARKED] & 0x0f | digit << 4;
        self
    }

    /// Returns whether the client may retain the lock, so that its holder may be idle.
    pub(crate) fn retains(self) -> bool {
        self.0[MARKED] >> 4 == RETAINS
    }

    /// Returns an alias of the token, by number, for an acquisition that needs several tokens.
    /// All aliases share their [`stem`](Self::stem).
    pub(crate) fn alias(self, number: u16) -> Self {
        let bits = self.bits();
        let end = (bits as u16).wrapping_add(number);
        Self::from_bits(bits >> 16 << 16 | u128::from(end))
    }

    /// Returns the common prefix of all aliases of an acquisition.
    pub(crate) fn stem(self) -> u128 {
        self.bits() >> 16
    }

    /// Returns the token as a binary record contains it.
    #[cfg(feature = "records")]
    pub(crate) fn to_bytes(self) -> [u8; 16] {
        self.0
    }

    #[cfg(feature = "records")]
    pub(crate) fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Returns the token as a store keeps it: 32 lower-case hexadecimal digits.
    pub fn to_hex(self) -> [u8; 32] {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let mut text = [0; 32];
        for (place, byte) in text.chunks_exact_mut(2).zip(self.0) {
            place[0] = DIGITS[usize::from(byte >> 4)];
            place[1] = DIGITS[usize::from(byte & 15)];
        }
        text
    }

    /// Parses a token that a store keeps as `text`.
    pub fn from_hex(text: &str) -> Option<Self> {
        let is_digit = |byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        if text.len() != 32 || !text.bytes().all(is_digit) {
            return None;
        }
        u128::from_str_radix(text, 16).ok().map(Self::from_bits)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// One acquisition of a lock: the token that holds or wants the key, and the mode.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Hold {
    /// The lock.
    pub key: LockKey,
    /// The mode in which it is held.
    pub mode: Mode,
    /// The token of the acquisition.
    pub token: Token,
}

impl Hold {
    /// Creates the acquisition `token` of `key` in `mode`.
    pub fn new(key: LockKey, mode: Mode, token: Token) -> Self {
        Self { key, mode, token }
    }

    /// Returns the same acquisition under another token.
    pub(crate) fn alias(&self, token: Token) -> Self {
        Self::new(self.key.clone(), self.mode, token)
    }

    /// Returns the same acquisition before its conversion.
    pub(crate) fn as_writer(&self) -> Self {
        Self::new(self.key.clone(), Mode::Exclusive, self.token)
    }
}

/// A request to acquire one key.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct KeyRequest {
    /// The acquisition.
    pub hold: Hold,
    /// How long the store keeps the lock without a renewal.
    pub lease: Duration,
    /// Bounds the effect of a delayed request: once the deadline has passed and an
    /// [`abandon`](super::Store::abandon) sent after it is acknowledged, no request of the token
    /// has an effect any more.
    ///
    /// Before the deadline, a delayed request may be executed after the token was abandoned, so
    /// the caller abandons the token again. A store with a clock replies [`AcquireReply::Late`] to
    /// a request that it executes after the deadline, and does nothing. A store without a clock
    /// can ignore the deadline if no request of an abandoned token ever has an effect there.
    pub deadline: Instant,
    /// The behavior if the lock is not free.
    pub if_busy: IfBusy,
    /// After a refusal, the caller sends another request to be queued. So the refusal need not be
    /// certain that the lock is not free.
    pub then_queues: bool,
    /// The number of fencing tokens to reserve with the grant, in addition to its own (see
    /// [`Grant::reserved`]). For exclusive holds only. A store may reserve none.
    pub reserved: u32,
    /// A reader with which this request may be admitted even if others wait, because it waited
    /// behind that reader in the same queue entry. So readers are admitted in groups, and a
    /// waiting writer is delayed by at most one group. For shared holds only.
    pub reader_group: Option<Token>,
    /// The fencing token that the grant of `acquire` is to have, of a request to a
    /// [`QuorumMember`](super::QuorumMember). The grant has this number, unless the store has
    /// issued it or a larger one before, or it is more than [`MAX_PROPOSAL_SKEW`] ahead of the
    /// store's clock.
    pub proposal: Option<FencingToken>,
}

impl KeyRequest {
    /// Creates a request that is refused if the lock is not free.
    pub fn new(hold: Hold, lease: Duration, deadline: Instant) -> Self {
        Self {
            hold,
            lease,
            deadline,
            if_busy: IfBusy::Refuse,
            then_queues: false,
            reserved: 0,
            reader_group: None,
            proposal: None,
        }
    }

    /// Sets the reader with which the request may be admitted.
    #[must_use]
    pub fn reader_group(mut self, reader_group: Option<Token>) -> Self {
        self.reader_group = reader_group;
        self
    }

    /// Sets the number of fencing tokens to reserve in addition to its own.
    #[must_use]
    pub fn reserved(self, reserved: u32) -> Self {
        Self { reserved, ..self }
    }

    /// Queues the request if the lock is not free.
    #[must_use]
    pub fn queued(mut self) -> Self {
        self.if_busy = IfBusy::Queue;
        self
    }
}

/// The behavior of a request if the lock is not free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IfBusy {
    /// The store replies [`AcquireReply::Busy`].
    Refuse,
    /// The request is queued. A store without wait queues replies `Busy`.
    Queue,
}

/// A lock that has been granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Grant {
    /// The fencing token, larger than that of every earlier grant of the key.
    pub fence: FencingToken,
    /// The remaining lease: all of it for a new grant, less if a repeated request finds its own
    /// grant, and at most [`HANDOFF_LEASE`](Self::HANDOFF_LEASE) for a grant from the wait queue.
    pub ttl: Duration,
    /// The number of fencing tokens after `fence` that are reserved for this grant. They are not
    /// issued to others while it lasts.
    pub reserved: u32,
}

/// The longest time by which a proposed fencing token may be ahead of the store's clock. It keeps
/// a client whose clock is far ahead from using up the numbers of a year.
pub const MAX_PROPOSAL_SKEW: Duration = Duration::from_secs(60);
/// The most fencing tokens that are reserved with a grant. A larger count in a message is forged.
#[cfg(any(feature = "redis", feature = "records"))]
pub(crate) const MOST_RESERVED: u32 = 1024;
/// The number of fencing tokens that are reserved for a lock that is to be retained: as many as
/// every version accepts, with the grant's own.
pub(crate) const RETAINED: u32 = 1023;

impl Grant {
    /// The longest time for which a grant from the wait queue lasts without a renewal. So a lock
    /// that was handed off to a dead process becomes free again soon.
    pub const HANDOFF_LEASE: Duration = Duration::from_secs(3);

    /// Creates a grant that lasts for another `ttl`.
    pub fn new(fence: FencingToken, ttl: Duration) -> Self {
        Self {
            fence,
            ttl,
            reserved: 0,
        }
    }

    /// Sets the number of fencing tokens that are reserved after its own.
    #[must_use]
    pub fn reserved(self, reserved: u32) -> Self {
        Self { reserved, ..self }
    }
}

/// A part of a lock that a store keeps under a key of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeyPart {
    /// The holders.
    Lock,
    /// The latest fencing token.
    Fence,
    /// The wait queue.
    Queue,
}

/// The reply to [`Store::acquire`](super::Store::acquire).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AcquireReply {
    /// The token of the request holds the lock. A repeated request receives the same grant. A
    /// shared one may receive it with a larger fencing token.
    Granted(Grant),
    /// The request is in the wait queue. A pushed grant is valid only if its fencing token is
    /// larger than `counter`.
    Queued {
        /// The latest fencing token of the key, if any.
        counter: Option<FencingToken>,
        /// The remaining lease of the holder, if known.
        holder_ttl: Option<Duration>,
    },
    /// The lock is not free, and the request was not queued.
    Busy {
        /// The remaining lease of the holder, if known.
        holder_ttl: Option<Duration>,
        /// Whether another request waits for the lock.
        has_waiters: bool,
    },
    /// The same for a lock whose holder may retain it, idle: a request that is queued makes its
    /// client release it, if no task uses it.
    Retained {
        /// The remaining lease of the holder, if known.
        holder_ttl: Option<Duration>,
    },
    /// The deadline had passed when the store executed the request. Nothing was done. Never the
    /// reply of a store without a clock.
    Late,
    /// Foreign data is stored under this key of the lock. It was left untouched.
    ForeignKey(KeyPart),
    /// The lock is held in a form that this mode cannot read. Never the reply to permits beside
    /// permits of another number: each request counts all holders against its own number.
    ModeMismatch,
    /// The lock is done, with this result: see [`Release::result`].
    Done(Arc<Done>),
}

/// The reply to [`Store::acquire_all`](super::Store::acquire_all).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AcquireAllReply {
    /// All locks are held: a grant for each request, in the same order.
    Granted(Vec<Grant>),
    /// No lock is held, because the request at `index` could not be granted. It is the first such
    /// request.
    Refused {
        /// The index of the request.
        index: usize,
        /// The reply to the request. Never `Granted` or `Queued`.
        reply: AcquireReply,
    },
}

/// The reply to [`Store::poll`](super::Store::poll).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PollReply {
    /// The lock is held, with this remaining lease. For a shared hold, the fencing token may be a
    /// new, larger one.
    Granted(Grant),
    /// The request is still in the wait queue.
    Queued {
        /// The latest fencing token of the key, if any.
        counter: Option<FencingToken>,
        /// The remaining lease of the holder, if known.
        holder_ttl: Option<Duration>,
    },
    /// The token neither holds the lock nor waits for it.
    Gone,
    /// The lock is done, with this result: see [`Release::result`]. The request is no longer in the
    /// wait queue.
    Done(Arc<Done>),
}

/// A request to keep one lock for another `lease` from now.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Renewal {
    /// The acquisition.
    pub hold: Hold,
    /// The lock is kept for at least this time from now. Zero queries the state and changes
    /// nothing.
    pub lease: Duration,
    /// The lock is kept for at most this time from now, even if that shortens its lease. The caller
    /// sets it after a reply has shown more time than was ever requested for the lock: the clock of
    /// the store was set back. `None` never shortens the lease.
    pub at_most: Option<Duration>,
}

impl Renewal {
    /// Creates a renewal that keeps `hold` for at least `lease` from now.
    pub fn new(hold: Hold, lease: Duration) -> Self {
        Self {
            hold,
            lease,
            at_most: None,
        }
    }

    /// Corrects a lease that the clock of the store has made too long.
    pub fn at_most(self, at_most: Option<Duration>) -> Self {
        Self { at_most, ..self }
    }

    #[cfg(feature = "records")]
    pub(super) fn hold(&self) -> &Hold {
        &self.hold
    }
}

/// The reply to one [`Renewal`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RenewReply {
    /// The lock is held for `ttl` from now.
    Renewed {
        /// The remaining lease. It is longer than requested if it was longer before the renewal.
        ttl: Duration,
    },
    /// The lock is no longer held. This is final, because a renewal never creates a lease.
    Gone,
}

/// A request to release a lock.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Release {
    /// The acquisition.
    pub hold: Hold,
    /// The lock stays reserved for this time from now, and is granted to no other request
    /// (`min_hold`).
    pub keep_for: Option<Duration>,
    /// The acquisition that takes the lock again in the same step, or joins the end of the wait
    /// queue if it is not empty. For exclusive holds only, and instead of `keep_for`.
    pub next: Option<NextHolder>,
    /// The result of the work under the lock, which the store keeps for `keep_for`. For that time
    /// the lock is *done*: requests for it are refused, those that wait included, and
    /// [`Store::done`](super::Store::done) returns the result. For exclusive holds only, with the
    /// fencing token of the hold.
    pub result: Option<(FencingToken, Arc<[u8]>)>,
}

/// The result of the work under a lock that is done.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Done {
    /// The result.
    pub value: Vec<u8>,
    /// The fencing token under which the work ran.
    pub fence: FencingToken,
    /// When the result was recorded, by the clock of the store.
    pub at: SystemTime,
    /// The identifier with which [`RevokeScope::Holder`](super::RevokeScope::Holder) makes the lock
    /// free again.
    pub id: HolderId,
}

impl Done {
    /// Creates the result `value` of a holder, recorded this time after 1970.
    pub(crate) fn new(value: Vec<u8>, fence: FencingToken, micros: u64, id: HolderId) -> Self {
        let at = SystemTime::UNIX_EPOCH.checked_add(Duration::from_micros(micros));
        Self {
            value,
            fence,
            at: at.unwrap_or(SystemTime::UNIX_EPOCH),
            id,
        }
    }
}

impl fmt::Debug for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Done")
            .field("bytes", &self.value.len())
            .field("fence", &self.fence)
            .field("at", &self.at)
            .finish_non_exhaustive()
    }
}

/// An acquisition that takes a lock again in the same step in which it is released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NextHolder {
    /// A fresh token.
    pub token: Token,
    /// The lease.
    pub lease: Duration,
    /// The number of fencing tokens to reserve, as in [`KeyRequest::reserved`].
    pub reserved: u32,
}

impl NextHolder {
    /// Creates an acquisition that takes the lock again under `token`.
    pub fn new(token: Token, lease: Duration, reserved: u32) -> Self {
        Self {
            token,
            lease,
            reserved,
        }
    }
}

impl Release {
    /// Creates a release of `hold`.
    pub fn new(hold: Hold) -> Self {
        Self {
            hold,
            keep_for: None,
            next: None,
            result: None,
        }
    }

    /// Makes the lock done with this result for the time of its reservation.
    #[must_use]
    pub fn result(self, result: Option<(FencingToken, Arc<[u8]>)>) -> Self {
        Self { result, ..self }
    }

    /// Reserves the lock until then, as of `now`.
    pub(crate) fn keep_until(self, until: Option<Instant>, now: Instant) -> Self {
        let left = until.and_then(|until| until.checked_duration_since(now));
        self.keep_for(left.filter(|left| !left.is_zero()))
    }

    /// Reserves the lock for `keep_for` from now.
    #[must_use]
    pub fn keep_for(self, keep_for: Option<Duration>) -> Self {
        Self { keep_for, ..self }
    }

    /// Lets `next` take the lock again, or join the wait queue.
    #[must_use]
    pub fn next(mut self, next: NextHolder) -> Self {
        self.next = Some(next);
        self
    }
}

/// The reply to [`Store::release`](super::Store::release).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReleaseReply {
    /// The lock was released.
    Released,
    /// The lock was released, and `next` holds it again.
    Passed(Grant),
    /// The lock was released and handed off to the next waiter, and `next` is in the wait queue.
    Queued {
        /// The latest fencing token of the key, if any.
        counter: Option<FencingToken>,
        /// The remaining lease of the new holder, if known.
        holder_ttl: Option<Duration>,
    },
    /// The token did not hold the lock. Nothing was done.
    NotHeld,
}

/// The reply to [`QuorumMember::raise`](super::QuorumMember::raise).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RaiseReply {
    /// The latest fencing token was smaller, and is now the given one.
    Raised,
    /// The latest fencing token was at least as large. Nothing was changed.
    NotRaised {
        /// The latest fencing token of the lock.
        latest: FencingToken,
    },
}

/// The reply to [`Store::convert`](super::Store::convert).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConvertReply {
    /// The writer is now a reader under the same token, with the same remaining lease and a new
    /// fencing token. A repeated request is answered in the same way.
    Converted(Grant),
    /// The token did not hold the lock.
    NotHeld,
}

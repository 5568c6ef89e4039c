//! The identities of clients, and the identifiers of holders.

use std::{fmt, str::FromStr, sync::Arc, time::Duration};

use sha1_smol::Sha1;

use super::message::Token;
use crate::{
    error::{LockError, LockErrorKind},
    observe::text::push_visible,
    request::key::LockKey,
    shell::random::random,
};

/// The identifier of a client: the first 40 bits of its tokens, chosen at random.
///
/// A store keeps the name of the client under it. It is not a secret: 88 bits of a token are left
/// to guess.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientId(u64);

impl ClientId {
    /// The number of bits.
    pub(super) const BITS: u32 = 40;

    pub(super) fn first_of(bits: u64) -> Self {
        Self(bits >> (u64::BITS - Self::BITS))
    }

    /// Generates a fresh identifier.
    #[doc(hidden)]
    pub fn random() -> Self {
        Self::first_of(random())
    }

    pub(super) fn bits(self) -> u64 {
        self.0
    }

    /// Parses an identifier from the format of `Display`.
    pub fn from_hex(text: &str) -> Option<Self> {
        hexadecimal(text, 10).map(Self)
    }
}

impl fmt::Display for ClientId {
    /// Writes 10 lower-case hexadecimal digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:010x}", self.0)
    }
}

impl fmt::Debug for ClientId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClientId({self})")
    }
}

/// The identifier of one holder of one lock, for
/// [`Revoke::holder`](crate::operator::Revoke::holder).
///
/// It is a digest that reveals neither the token nor the value of a foreign holder, unless that
/// value can be guessed. Another acquisition of the same lock has another identifier; acquisitions
/// that a client hands off from one of its tasks to the next are one. All servers of a quorum give
/// a holder the same one.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), lock_runtime::LockError> {
/// use lock_runtime::{LockClient, operator::{HolderId, Revocation}};
///
/// let locks = LockClient::in_memory();
/// let guard = locks.exclusive("order:42").acquire().await?;
/// let shown = locks.inspect("order:42").await?.holders[0].id.to_string();
/// guard.release().await?;
///
/// let guard = locks.exclusive("order:42").acquire().await?;
/// let seen: HolderId = shown.parse()?;
/// let reply = locks.revoke("order:42").holder(seen).await?;
/// assert_eq!(reply, Revocation::Changed);
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(try_from = "String", into = "String")
)]
pub struct HolderId(u64);

impl HolderId {
    /// The identifier of an acquisition, or of the reservation that it has left (`min_hold`).
    pub(crate) fn of(key: &LockKey, token: Token, is_reservation: bool) -> Self {
        // As in holder_id.lua. All aliases of an acquisition share these digits.
        let hex = token.to_hex();
        let mut digest = Sha1::from(key.as_str());
        digest.update(b"\n");
        digest.update(&hex[..28]);
        if is_reservation {
            digest.update(b".kept");
        }
        let [a, b, c, d, e, f, g, h, ..] = digest.digest().bytes();
        Self(u64::from_be_bytes([a, b, c, d, e, f, g, h]))
    }
}

impl fmt::Display for HolderId {
    /// Writes 16 lower-case hexadecimal digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for HolderId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HolderId({self})")
    }
}

impl FromStr for HolderId {
    type Err = LockError;

    fn from_str(text: &str) -> Result<Self, LockError> {
        hexadecimal(text, 16).map(Self).ok_or_else(|| {
            let message = "the identifier of a holder has 16 hexadecimal digits, as `inspect` and `list` show it";
            LockError::new(LockErrorKind::InvalidSpec, message)
        })
    }
}

impl TryFrom<String> for HolderId {
    type Error = LockError;

    fn try_from(text: String) -> Result<Self, LockError> {
        text.parse()
    }
}

impl From<HolderId> for String {
    fn from(id: HolderId) -> Self {
        id.to_string()
    }
}

fn hexadecimal(text: &str, digits: usize) -> Option<u64> {
    let is_digit = |byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    let is_valid = text.len() == digits && text.bytes().all(is_digit);
    is_valid.then(|| u64::from_str_radix(text, 16).ok())?
}

/// The client that holds a lock or waits for it.
///
/// `Display` writes its name, or that there is none: `orders@web-3:4711`, `an unnamed client`,
/// `a foreign client`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Identity {
    /// A client of this library.
    Client {
        /// The identifier of the client.
        id: ClientId,
        /// The name of the client
        /// ([`LockClientBuilder::identity`](crate::LockClientBuilder::identity)). Control
        /// characters are escaped. `None` for a client without a name, for one of a version that
        /// stored none, and where the store has lost it.
        name: Option<Arc<str>>,
    },
    /// Another program, which set the key by itself.
    Foreign,
}

impl Identity {
    /// The time for which a store keeps the name of a client. The client repeats it well before.
    pub const TTL: Duration = Duration::from_secs(15 * 60);
    /// The longest name of a client, in bytes.
    pub const MAX_BYTES: usize = 128;

    /// The client with this identifier, before its name is known.
    #[doc(hidden)]
    pub fn unnamed(id: ClientId) -> Self {
        Self::Client { id, name: None }
    }

    /// Returns the name of the client, if it is known.
    pub fn name(&self) -> Option<&str> {
        match self {
            Self::Client { name, .. } => name.as_deref(),
            Self::Foreign => None,
        }
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Client { name, .. } => name.as_deref().unwrap_or("an unnamed client"),
            Self::Foreign => "a foreign client",
        })
    }
}

/// Returns a name without control characters and characters that change the direction of the text,
/// of at most [`Identity::MAX_BYTES`]: any client may have written it.
pub(crate) fn presentable(name: &str) -> Arc<str> {
    let mut shown = String::with_capacity(name.len().min(Identity::MAX_BYTES));
    for c in name.chars() {
        let begin = shown.len();
        push_visible(c, &mut shown);
        if shown.len() > Identity::MAX_BYTES {
            shown.truncate(begin);
            break;
        }
    }
    shown.into()
}

/// Returns the name of a client that was given none: `<program>@<host>:<process>`.
pub(crate) fn default_name() -> String {
    let program = std::env::current_exe().ok();
    let program = program.as_deref().and_then(|path| path.file_stem());
    let program = program.map_or("unknown".into(), |name| name.to_string_lossy());
    let host = gethostname::gethostname();
    format!(
        "{program}@{}:{}",
        host.to_string_lossy(),
        std::process::id()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_bounded_and_has_no_control_characters() {
        let shown = |name: &str| presentable(name).to_string();
        assert_eq!(shown("orders@web-3:4711"), "orders@web-3:4711");
        assert_eq!(shown("a\nb\u{1b}[2J"), "a\\u{a}b\\u{1b}[2J");
        assert_eq!(shown("a\u{202e}b"), "a\\u{202e}b");
        assert_eq!(shown(&"x".repeat(500)).len(), Identity::MAX_BYTES);
        assert!(shown(&"\u{7}".repeat(500)).len() <= Identity::MAX_BYTES);
        assert_eq!(shown(&"ü".repeat(500)).len(), Identity::MAX_BYTES);
    }

    #[test]
    fn the_default_name_has_program_host_and_process() {
        let name = default_name();
        let (program, rest) = name.split_once('@').unwrap();
        let (host, process) = rest.rsplit_once(':').unwrap();
        assert!(!program.is_empty() && !host.is_empty(), "{name}");
        assert_eq!(process, std::process::id().to_string());
    }

    #[test]
    fn tokens_of_a_client_begin_with_its_identifier() {
        let client = ClientId::random();
        let (one, other) = (Token::of(client), Token::of(client));
        assert_ne!(one, other);
        assert_eq!((one.client(), other.client()), (client, client));
        let hex = one.to_hex();
        assert_eq!(client.to_string().as_bytes(), &hex[..10]);
        assert_eq!(ClientId::from_hex(&client.to_string()), Some(client));
    }

    #[test]
    fn an_acquisition_has_one_identifier_under_all_aliases() {
        let (key, token) = (LockKey::new("k").unwrap(), Token::random());
        let id = HolderId::of(&key, token, false);
        assert_eq!(HolderId::of(&key, token.alias(7), false), id);
        assert_ne!(HolderId::of(&key, token, true), id);
        assert_ne!(HolderId::of(&LockKey::new("l").unwrap(), token, false), id);
        assert_eq!(id.to_string().parse::<HolderId>().unwrap(), id);
        for wrong in ["", "12", "000000000000000g", "00000000000000000"] {
            assert!(wrong.parse::<HolderId>().is_err(), "{wrong}");
        }
    }
}

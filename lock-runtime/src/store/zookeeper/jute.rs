//! ZooKeeper's encoding of requests and replies.

use crate::store::StoreError;

use super::error;

/// The right to everything.
const ALL: i32 = 31;
const NO_VERSION: i32 = -1;

/// The users that may use a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Anyone,
    /// The user of the session.
    Own,
}

/// The kind of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Lasting = 0,
    /// It ends with the session.
    OfSession = 1,
    /// A lasting one, with a number of ten digits at the end of its name.
    Numbered = 2,
}

/// A change of one node.
#[derive(Clone, Debug)]
pub(super) enum Change {
    Create {
        path: String,
        data: Vec<u8>,
        access: Access,
        kind: Kind,
    },
    /// With any version if there is none.
    Set {
        path: String,
        data: Vec<u8>,
        version: Option<i32>,
    },
    Delete {
        path: String,
        version: Option<i32>,
    },
    /// Changes nothing. Refused if there is no such node.
    Check {
        path: String,
    },
}

#[derive(Clone, Debug)]
pub(super) enum Request {
    Change(Change),
    /// All of them or none.
    Multi(Vec<Change>),
    Get {
        path: String,
        watch: bool,
    },
    Children {
        path: String,
        watch: bool,
    },
    Ping,
    Authenticate {
        user: String,
    },
    Close,
}

/// The node of a reply.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) data: Vec<u8>,
    pub(super) version: i32,
}

/// The outcome of changes: the versions of the nodes; or, if nothing was done, the change that was
/// refused, with the error.
pub(super) type Changed = Result<Vec<i32>, (usize, i32)>;

/// The number that a reply has which answers no call: an event, a ping, a user.
pub(super) const EVENT: i32 = -1;
pub(super) const PING: i32 = -2;
pub(super) const USER: i32 = -4;

impl Change {
    fn code(&self) -> i32 {
        match self {
            Self::Create { .. } => 1,
            Self::Delete { .. } => 2,
            Self::Set { .. } => 5,
            Self::Check { .. } => 13,
        }
    }

    fn write(&self, to: &mut Writer) {
        match self {
            Self::Create {
                path,
                data,
                access,
                kind,
            } => {
                to.text(path);
                to.bytes(data);
                let (scheme, id) = match access {
                    Access::Anyone => ("world", "anyone"),
                    Access::Own => ("auth", ""),
                };
                to.int(1);
                to.int(ALL);
                to.text(scheme);
                to.text(id);
                to.int(*kind as i32);
            }
            Self::Set {
                path,
                data,
                version,
            } => {
                to.text(path);
                to.bytes(data);
                to.int(version.unwrap_or(NO_VERSION));
            }
            Self::Delete { path, version } => {
                to.text(path);
                to.int(version.unwrap_or(NO_VERSION));
            }
            Self::Check { path } => {
                to.text(path);
                to.int(NO_VERSION);
            }
        }
    }
}

impl Request {
    /// Returns the frame of the request with this number.
    pub(super) fn frame(&self, number: i32) -> Vec<u8> {
        let mut to = Writer::new();
        let (number, code) = match self {
            Self::Change(change) => (number, change.code()),
            Self::Multi(_) => (number, 14),
            Self::Get { .. } => (number, 4),
            Self::Children { .. } => (number, 8),
            Self::Ping => (PING, 11),
            Self::Authenticate { .. } => (USER, 100),
            Self::Close => (number, -11),
        };
        to.int(number);
        to.int(code);
        match self {
            Self::Change(change) => change.write(&mut to),
            Self::Multi(changes) => {
                for change in changes {
                    to.header(change.code(), false);
                    change.write(&mut to);
                }
                to.header(-1, true);
            }
            Self::Get { path, watch } | Self::Children { path, watch } => {
                to.text(path);
                to.bool(*watch);
            }
            Self::Authenticate { user } => {
                to.int(0);
                to.text("digest");
                to.text(user);
            }
            Self::Ping | Self::Close => {}
        }
        to.frame()
    }
}

/// Returns the frame of the request for a session that lasts for this time after its latest sign of
/// life.
pub(super) fn hello(millis: i32) -> Vec<u8> {
    let mut to = Writer::new();
    to.int(0);
    // The latest change that the server must know: each read here comes after a write.
    to.long(0);
    to.int(millis);
    to.long(0);
    to.bytes(&[0; 16]);
    to.bool(false);
    to.frame()
}

/// Writes a frame.
struct Writer(Vec<u8>);

impl Writer {
    fn new() -> Self {
        // The length comes here.
        Self(vec![0; 4])
    }

    fn frame(mut self) -> Vec<u8> {
        let length = (self.0.len() - 4) as u32;
        self.0[..4].copy_from_slice(&length.to_be_bytes());
        self.0
    }

    fn int(&mut self, number: i32) {
        self.0.extend(number.to_be_bytes());
    }

    fn long(&mut self, number: i64) {
        self.0.extend(number.to_be_bytes());
    }

    fn bool(&mut self, is: bool) {
        self.0.push(u8::from(is));
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.int(bytes.len() as i32);
        self.0.extend(bytes);
    }

    fn text(&mut self, text: &str) {
        self.bytes(text.as_bytes());
    }

    /// The head of one part of a multi, or its end.
    fn header(&mut self, code: i32, is_end: bool) {
        self.int(code);
        self.bool(is_end);
        self.int(-1);
    }
}

/// Reads a frame. Nothing is read beyond its end.
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], StoreError> {
        let (first, rest) = self.0.split_first_chunk().ok_or_else(error::no_reply)?;
        self.0 = rest;
        Ok(*first)
    }

    pub(super) fn int(&mut self) -> Result<i32, StoreError> {
        self.take().map(i32::from_be_bytes)
    }

    pub(super) fn long(&mut self) -> Result<i64, StoreError> {
        self.take().map(i64::from_be_bytes)
    }

    fn bool(&mut self) -> Result<bool, StoreError> {
        self.take::<1>().map(|[byte]| byte != 0)
    }

    /// Returns a sequence of bytes. Its length is -1 where there is none.
    fn bytes(&mut self) -> Result<&'a [u8], StoreError> {
        let length = usize::try_from(self.int()?).unwrap_or(0);
        let (bytes, rest) = (self.0.split_at_checked(length)).ok_or_else(error::no_reply)?;
        self.0 = rest;
        Ok(bytes)
    }

    pub(super) fn text(&mut self) -> Result<String, StoreError> {
        let bytes = self.bytes()?.to_vec();
        String::from_utf8(bytes).map_err(|_| error::no_reply())
    }

    pub(super) fn texts(&mut self) -> Result<Vec<String>, StoreError> {
        let count = self.int()?;
        (0..count).map(|_| self.text()).collect()
    }

    /// Returns the version in the state of a node.
    pub(super) fn version(&mut self) -> Result<i32, StoreError> {
        // Two changes and two times before it, two versions and the rest after it.
        self.take::<32>()?;
        let version = self.int()?;
        self.take::<32>()?;
        Ok(version)
    }

    pub(super) fn node(&mut self) -> Result<Node, StoreError> {
        Ok(Node {
            data: self.bytes()?.to_vec(),
            version: self.version()?,
        })
    }

    /// Returns the outcome of a multi.
    pub(super) fn multi(&mut self) -> Result<Changed, StoreError> {
        let (mut versions, mut refused) = (Vec::new(), None);
        for index in 0.. {
            let (code, is_end) = (self.int()?, self.bool()?);
            self.int()?;
            if is_end {
                break;
            }
            let version = match code {
                1 => self.text().map(|_| 0)?,
                5 => self.version()?,
                -1 => {
                    // Those before the refused one have no error, and those after it another one.
                    let error = self.int()?;
                    if error != 0 && refused.is_none() {
                        refused = Some((index, error));
                    }
                    0
                }
                _ => 0,
            };
            versions.push(version);
        }
        Ok(refused.map_or(Ok(versions), Err))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_that_ends_early_is_an_error() {
        let frame = [0, 0, 0, 9, b'a'];
        assert!(Reader(&frame).text().is_err());
        assert!(Reader(&[0xff; 4]).text().is_ok_and(|text| text.is_empty()));
        assert!(Reader(&[0x7f; 12]).texts().is_err());
        assert!(Reader(&[0; 40]).node().is_err());
        assert!(Reader(&[]).multi().is_err());
    }

    #[test]
    fn the_first_refused_part_of_a_multi_is_named() {
        let mut reply = Writer(Vec::new());
        for error in [0, -103, -2] {
            reply.header(-1, false);
            reply.int(error);
        }
        reply.header(-1, true);
        assert_eq!(Reader(&reply.0).multi().unwrap(), Err((1, -103)));

        let mut reply = Writer(Vec::new());
        reply.header(1, false);
        reply.text("/path");
        reply.header(5, false);
        reply.0.extend([0; 32]);
        reply.int(7);
        reply.0.extend([0; 32]);
        reply.header(13, false);
        reply.header(-1, true);
        assert_eq!(Reader(&reply.0).multi().unwrap(), Ok(vec![0, 7, 0]));
    }
}

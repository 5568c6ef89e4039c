//! The messages between a command's process and the keeper of its lock, one on each line.

use std::{
    io::{self, Write},
    time::Duration,
};

use lock_runtime::time::{Instant, uptime};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// A message of the keeper. Times are those of the system's clock that counts suspension, which all
/// processes share: a message may be read long after it was written.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Report {
    Granted {
        fence: u64,
        until: u64,
    },
    Valid {
        until: u64,
    },
    Lost {
        code: String,
        message: String,
    },
    Refused {
        status: u8,
        code: String,
        message: String,
    },
    Released {
        /// The reason if the release was not confirmed.
        warning: Option<String>,
    },
}

/// A message to the keeper.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Order {
    /// The command may run from now on.
    Starting,
    /// The command has this process group.
    Started { group: i32 },
    /// The keeper is to report how long the lock is held.
    Report,
    /// The command has got SIGTERM, as the lock is lost, and will get SIGKILL.
    Ending,
    /// The command has ended.
    Ended,
}

pub(super) fn write(message: &impl Serialize, to: &mut impl Write) -> io::Result<()> {
    let line = serde_json::to_string(message)?;
    writeln!(to, "{line}")?;
    to.flush()
}

/// Parses a line. `None` for the end, or for the message of another version.
pub(super) fn parse<T: DeserializeOwned>(line: &str) -> Option<T> {
    serde_json::from_str(line).ok()
}

/// Nanoseconds of the clock that all processes share.
fn clock() -> u64 {
    u64::try_from(uptime().as_nanos()).unwrap_or(u64::MAX)
}

pub(super) fn time_after(validity: Duration) -> u64 {
    clock() + u64::try_from(validity.as_nanos()).unwrap_or(0)
}

pub(super) fn instant(time: u64) -> Instant {
    let left = time.saturating_sub(clock());
    Instant::now() + Duration::from_nanos(left)
}

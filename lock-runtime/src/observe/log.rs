//! Log lines that an outage would repeat for each request: the first is written at once, then one
//! for ten seconds and cause, with the number of those left out before it.

use std::{
    collections::HashMap,
    mem,
    sync::{LazyLock, Mutex},
    time::Duration,
};

use tokio::runtime::{Handle, Id};

use crate::{shell::sync::lock, shell::time::Instant};

/// The time between two lines of one cause.
const PERIOD: Duration = Duration::from_secs(10);
/// The number of causes that are distinguished by name. Beyond it the lines of a cause share one
/// entry, whatever their names.
const MOST: usize = 256;

/// What lines have in common that are written as one.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Cause {
    /// The message.
    message: &'static str,
    /// The code of the error, or another short word.
    code: &'static str,
    /// The name of the policy, the function or the server.
    name: Option<Box<str>>,
    /// Each runtime may have a clock of its own.
    runtime: Option<Id>,
}

/// The lines of one cause.
struct Entry {
    /// The next line is due then.
    due: Instant,
    /// The number of lines left out since the latest one.
    left_out: u64,
}

static TABLE: LazyLock<Mutex<HashMap<Cause, Entry>>> = LazyLock::new(Mutex::default);

/// Writes a line by `write`, or counts it if one of the same message, code and name was written in
/// the last ten seconds.
///
/// The argument of `write` is the number of lines that were left out since the latest one, if any,
/// and becomes the field `left_out`.
pub fn summarise(
    message: &'static str,
    code: &'static str,
    name: Option<&str>,
    write: impl FnOnce(Option<u64>),
) {
    #[cfg(test)]
    if crate::shell::simulated::is_simulated() {
        return;
    }
    let cause = Cause {
        message,
        code,
        name: name.map(Box::from),
        runtime: Handle::try_current().ok().map(|it| it.id()),
    };
    if let Some(left_out) = turn_of(cause) {
        write((left_out > 0).then_some(left_out));
    }
}

/// Returns the number of lines left out before this one, or `None` if it is left out itself.
fn turn_of(mut cause: Cause) -> Option<u64> {
    let now = Instant::now();
    let mut table = lock(&TABLE);
    if table.len() >= MOST && !table.contains_key(&cause) {
        table.retain(|_, entry| entry.due > now);
        if table.len() >= MOST {
            cause.name = None;
        }
    }
    let entry = table.entry(cause).or_insert(Entry {
        due: now,
        left_out: 0,
    });
    if entry.due > now {
        entry.left_out += 1;
        return None;
    }
    entry.due = now + PERIOD;
    Some(mem::take(&mut entry.left_out))
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    fn said(name: &str) -> Option<Option<u64>> {
        let mut line = None;
        summarise("refused", "unavailable", Some(name), |left_out| {
            line = Some(left_out);
        });
        line
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_line_is_written_at_once_and_every_other_one_is_counted() {
        assert_eq!(said("pay"), Some(None));
        assert_eq!(said("cancel"), Some(None));
        (1..1000).for_each(|_| assert_eq!(said("pay"), None));
        advance(PERIOD).await;
        assert_eq!(said("pay"), Some(Some(999)));
        assert_eq!(said("pay"), None);
        advance(2 * PERIOD).await;
        assert_eq!(said("pay"), Some(Some(1)));
        advance(PERIOD).await;
        assert_eq!(said("pay"), Some(None), "the only one of its ten seconds");

        // The number of causes is bounded.
        for number in 0..2 * MOST {
            said(&format!("many-{number}"));
        }
        let count = lock(&TABLE).len();
        assert!(count <= MOST + 64, "{count}");
        advance(2 * PERIOD).await;
        said("one more");
        assert!(lock(&TABLE).len() < MOST);
    }
}

//! Log lines that an outage would repeat for each request: the first is written at once, then one
//! for ten seconds and cause, with the number of those left out.
//!
//! The last line of a burst is written as well, by a task on the runtime of the first line that was
//! left out. When that runtime ends, it is written at once.

use std::{
    collections::HashMap,
    sync::{LazyLock, Mutex},
    time::Duration,
};

use tokio::runtime::{Handle, Id};
use tracing::{Dispatch, dispatcher};

use crate::{
    shell::runtime,
    shell::sync::OnDrop,
    shell::sync::lock,
    shell::time::{Instant, sleep_until},
};

/// The time between two lines of one cause.
const PERIOD: Duration = Duration::from_secs(10);
/// The number of causes that are distinguished by name. Beyond it the lines of a cause share one
/// entry, whatever their names.
const MOST: usize = 256;

/// What lines have in common that are written as one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Cause {
    /// The message.
    message: &'static str,
    /// The code of the error, or another short word.
    code: &'static str,
    /// The name of the policy, the function or the server.
    name: Option<Box<str>>,
    runtime: Option<Id>,
}

/// The lines of one cause.
struct Entry {
    /// The next line is due then.
    due: Instant,
    /// The number of lines left out since the latest one.
    left_out: u64,
    /// The first line that was left out.
    pending: Option<(Write, Dispatch)>,
}

/// Writes a line, with the number of others that it stands for.
type Write = Box<dyn FnOnce(Option<u64>) + Send>;

type Table = HashMap<Cause, Entry>;

static TABLE: LazyLock<Mutex<Table>> = LazyLock::new(Mutex::default);

/// Writes a line, or counts it if one of the same message, code and name was written in the last
/// ten seconds.
///
/// The function that `line` returns writes it, now or later. Its argument is the number of lines
/// that were left out, if any, and becomes the field `left_out`.
pub fn summarise<F: FnOnce(Option<u64>) + Send + 'static>(
    message: &'static str,
    code: &'static str,
    name: Option<&str>,
    line: impl FnOnce() -> F,
) {
    #[cfg(test)]
    if crate::shell::simulated::is_simulated() {
        return;
    }
    let runtime = runtime::current().ok();
    let cause = Cause {
        message,
        code,
        name: name.map(Box::from),
        runtime: runtime.as_ref().map(Handle::id),
    };
    if let Some(left_out) = take_turn(cause, runtime, || Box::new(line())) {
        left_out();
    }
}

/// Returns the line if it is to be written now.
fn take_turn(
    mut cause: Cause,
    runtime: Option<Handle>,
    line: impl FnOnce() -> Write,
) -> Option<impl FnOnce()> {
    let now = Instant::now();
    let mut table = lock(&TABLE);
    if table.len() >= MOST && !table.contains_key(&cause) {
        // The line of an entry with lines left out is still to be written.
        table.retain(|_, entry| entry.due > now || entry.left_out > 0);
        if table.len() >= MOST {
            cause.name = None;
        }
    }
    let entry = table.entry(cause.clone()).or_insert(Entry {
        due: now,
        left_out: 0,
        pending: None,
    });
    if entry.due <= now && entry.pending.is_none() {
        entry.due = now + PERIOD;
        let left_out = std::mem::take(&mut entry.left_out);
        drop(table);
        let write = line();
        return Some(move || write((left_out > 0).then_some(left_out)));
    }
    entry.left_out += 1;
    // Without a runtime, the next line has the number.
    if let (None, Some(runtime)) = (&entry.pending, runtime) {
        let due = entry.due;
        entry.pending = Some((line(), dispatcher::get_default(Dispatch::clone)));
        drop(table);
        // Outside of the mutex, as a runtime that is shutting down drops the task at once.
        let over = OnDrop::new(move || write_pending(&cause));
        runtime.spawn(async move {
            sleep_until(due).await;
            drop(over);
        });
    }
    None
}

/// Writes the line that stands for those that were left out.
fn write_pending(cause: &Cause) {
    let mut table = lock(&TABLE);
    let Some(entry) = table.get_mut(cause) else {
        return;
    };
    let (pending, left_out) = (entry.pending.take(), std::mem::take(&mut entry.left_out));
    entry.due = Instant::now() + PERIOD;
    drop(table);
    if let Some((write, dispatch)) = pending {
        dispatcher::with_default(&dispatch, || write((left_out > 1).then_some(left_out - 1)));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use tokio::time::{advance, sleep};

    use super::*;

    fn say(lines: &Sender<(u64, Option<u64>)>, number: u64, name: &str) {
        let lines = lines.clone();
        summarise("refused", "unavailable", Some(name), || {
            move |left_out| lines.send((number, left_out)).unwrap()
        });
    }

    fn said(lines: &Receiver<(u64, Option<u64>)>) -> Vec<(u64, Option<u64>)> {
        lines.try_iter().collect()
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_line_is_written_at_once_and_every_other_one_is_counted() {
        let (sender, lines) = channel();
        (0..1000).for_each(|number| say(&sender, number, "pay"));
        say(&sender, 0, "cancel");
        assert_eq!(said(&lines), [(0, None), (0, None)]);
        sleep(PERIOD + Duration::from_millis(1)).await;
        // The first of 999 that were left out.
        assert_eq!(said(&lines), [(1, Some(998))]);
        say(&sender, 7, "pay");
        sleep(PERIOD + Duration::from_millis(1)).await;
        assert_eq!(said(&lines), [(7, None)], "the only one of its ten seconds");
        sleep(PERIOD).await;
        say(&sender, 8, "pay");
        assert_eq!(said(&lines), [(8, None)]);
    }

    #[test]
    fn the_end_of_a_runtime_leaves_nothing_unwritten() {
        let (sender, lines) = channel();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        let runtime = runtime.unwrap();
        runtime.block_on(async { (0..9).for_each(|number| say(&sender, number, "ends")) });
        drop(runtime);
        assert_eq!(said(&lines), [(0, None), (1, Some(7))]);
    }

    #[tokio::test(start_paused = true)]
    async fn the_number_of_causes_is_bounded() {
        let (sender, _lines) = channel();
        (0..2 * MOST).for_each(|number| say(&sender, 0, &format!("many-{number}")));
        let count = lock(&TABLE).len();
        assert!(count <= MOST + 64, "{count}");
        advance(2 * PERIOD).await;
        say(&sender, 0, "one more");
        assert!(lock(&TABLE).len() < MOST);
    }
}

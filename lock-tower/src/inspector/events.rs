//! The stream of events by which a page refreshes itself.

use std::{
    fmt::Write as _,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body, Frame};
use lock_runtime::LockClient;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep_until, timeout, timeout_at},
};

use super::{Content, Inspector, View, html};
use crate::protocol::body::BoxError;

/// The least time between two events.
const PAUSE: Duration = Duration::from_secs(1);
/// The store is read again by a stream after this many times the time that reading has taken.
const REST: u32 = 9;
/// The length of a stream; the browser opens another one. A graceful shutdown waits for it.
const LENGTH: Duration = Duration::from_secs(5);
/// Asks the browser to open the next stream soon.
const RETRY: &str = "retry:500\n";
/// The time after which a stream whose reader has stopped gives its place to another one.
const STALLED: Duration = Duration::from_secs(30);
/// The time for which a page waits while others read the store.
const TURN: Duration = Duration::from_secs(10);

/// The streams of an [`Inspector`], and its turns to read all names of the store.
pub(super) struct Streams {
    max: usize,
    latest: AtomicU64,
    open: Mutex<Vec<Stream>>,
    /// Held while the store is read. The time before which no stream reads it again.
    reading: tokio::sync::Mutex<Option<Instant>>,
}

struct Stream {
    number: u64,
    opened: Instant,
    /// Since when it waits for its reader.
    unread_since: Option<Instant>,
}

/// The place of a stream among those of an [`Inspector`].
pub(super) struct Ticket {
    streams: Arc<Streams>,
    number: u64,
}

impl Streams {
    pub(super) fn new(max: usize) -> Self {
        Self {
            max,
            latest: AtomicU64::new(0),
            open: Mutex::default(),
            reading: tokio::sync::Mutex::default(),
        }
    }

    fn open(&self) -> MutexGuard<'_, Vec<Stream>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a place, if there is one, or that of a stream whose reader has stopped.
    pub(super) fn enter(self: &Arc<Self>) -> Option<Ticket> {
        let now = Instant::now();
        let mut open = self.open();
        if open.len() >= self.max {
            let is_stalled = |stream: &Stream| {
                let is_unread = |since: Instant| now > since + STALLED;
                let is_overdue = now > stream.opened + LENGTH + STALLED;
                is_overdue || stream.unread_since.is_some_and(is_unread)
            };
            let stalled = open.iter().position(is_stalled)?;
            open.swap_remove(stalled);
        }
        let number = self.latest.fetch_add(1, Ordering::Relaxed);
        open.push(Stream {
            number,
            opened: now,
            unread_since: None,
        });
        Some(Ticket {
            streams: self.clone(),
            number,
        })
    }

    /// Loads a view for a page. `None` if others read the store for too long.
    pub(super) async fn load(&self, locks: &LockClient, view: &View) -> Option<Content> {
        if !view.reads_all_names() {
            return Some(Content::load(locks, view).await);
        }
        let mut not_before = timeout(TURN, self.reading.lock()).await.ok()?;
        Some(read(locks, view, &mut not_before).await)
    }

    /// Loads a view for a stream, when it is its turn.
    async fn load_in_turn(&self, locks: &LockClient, view: &View) -> Content {
        if !view.reads_all_names() {
            return Content::load(locks, view).await;
        }
        loop {
            let mut not_before = self.reading.lock().await;
            match *not_before {
                Some(due) if due > Instant::now() => {
                    drop(not_before);
                    sleep_until(due).await;
                }
                _ => return read(locks, view, &mut not_before).await,
            }
        }
    }
}

async fn read(locks: &LockClient, view: &View, not_before: &mut Option<Instant>) -> Content {
    let since = Instant::now();
    let content = Content::load(locks, view).await;
    *not_before = Some(Instant::now() + since.elapsed() * REST);
    content
}

impl Ticket {
    /// Records whether the stream waits for its reader. Returns whether it still has a place.
    fn waits_for_reader(&self, waits: bool) -> bool {
        let mut open = self.streams.open();
        let own = open.iter_mut().find(|stream| stream.number == self.number);
        let has_place = own.is_some();
        if let Some(own) = own {
            own.unread_since = waits.then(Instant::now);
        }
        has_place
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let number = self.number;
        self.streams.open().retain(|stream| stream.number != number);
    }
}

/// A body of server-sent events. It reads from the store only while its reader does.
pub(super) struct Events {
    inspector: Inspector,
    view: View,
    ticket: Ticket,
    until: Instant,
    has_begun: bool,
    /// The task that makes the next event. A task goes on when the body is not polled, and so gives
    /// its turn to others; it ends with the body.
    next: JoinSet<Option<String>>,
}

impl Events {
    pub(super) fn new(inspector: Inspector, view: View, ticket: Ticket) -> Self {
        Self {
            inspector,
            view,
            ticket,
            until: Instant::now() + LENGTH,
            has_begun: false,
            next: JoinSet::new(),
        }
    }
}

impl Body for Events {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if !self.ticket.waits_for_reader(false) {
            return Poll::Ready(None);
        }
        // An event that is being made is sent, however long that takes.
        if self.next.is_empty() {
            if Instant::now() >= self.until {
                return Poll::Ready(None);
            }
            let (inspector, view, until) = (self.inspector.clone(), self.view.clone(), self.until);
            self.next.spawn(event(inspector, view, until));
        }
        let Some(Ok(Some(event))) = ready!(self.next.poll_join_next(cx)) else {
            self.until = Instant::now();
            return Poll::Ready(None);
        };
        self.ticket.waits_for_reader(true);
        let begin = if self.has_begun { "" } else { RETRY };
        self.has_begun = true;
        let bytes = format!("{begin}{event}");
        Poll::Ready(Some(Ok(Frame::data(bytes.into()))))
    }
}

/// The next event. `None` at the end of the stream.
async fn event(inspector: Inspector, view: View, until: Instant) -> Option<String> {
    let due = Instant::now() + PAUSE;
    timeout_at(until, sleep_until(due)).await.ok()?;
    let content = inspector
        .streams
        .load_in_turn(&inspector.locks, &view)
        .await;
    let html = html::live(&view, &content, inspector.may_revoke()).into_string();
    let mut event = String::with_capacity(html.len() + 8);
    for line in html.split(['\r', '\n']) {
        let _ = writeln!(event, "data:{line}");
    }
    event.push('\n');
    Some(event)
}

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
use futures_util::{FutureExt as _, future::BoxFuture};
use http_body::{Body, Frame};
use tokio::{
    sync::Semaphore,
    time::{Instant, sleep, timeout_at},
};

use super::{Content, Inspector, View, html};
use crate::body::BoxError;

/// The least time between two events.
const PAUSE: Duration = Duration::from_secs(1);
/// The next event is this many times as far away as the latest one took.
const REST: u32 = 9;
/// The length of a stream; the browser opens another one. A graceful shutdown waits for it.
const LENGTH: Duration = Duration::from_secs(10);
/// The time after which a stream whose reader has stopped gives its place to another one.
const STALLED: Duration = Duration::from_secs(30);

/// The streams of an [`Inspector`].
pub(super) struct Streams {
    max: usize,
    latest: AtomicU64,
    open: Mutex<Vec<Stream>>,
    /// Held while a stream reads from the store.
    reading: Semaphore,
}

struct Stream {
    number: u64,
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
            reading: Semaphore::new(1),
        }
    }

    fn open(&self) -> MutexGuard<'_, Vec<Stream>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a place, if there is one, or that of a stream whose reader has stopped.
    pub(super) fn enter(self: &Arc<Self>) -> Option<Ticket> {
        let mut open = self.open();
        if open.len() >= self.max {
            let is_stalled = |stream: &Stream| {
                let since = stream.unread_since;
                since.is_some_and(|since| since.elapsed() > STALLED)
            };
            let stalled = open.iter().position(is_stalled)?;
            open.swap_remove(stalled);
        }
        let number = self.latest.fetch_add(1, Ordering::Relaxed);
        open.push(Stream {
            number,
            unread_since: None,
        });
        Some(Ticket {
            streams: self.clone(),
            number,
        })
    }
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
    next: BoxFuture<'static, Option<(Bytes, Duration)>>,
}

impl Events {
    pub(super) fn new(inspector: Inspector, view: View, ticket: Ticket) -> Self {
        let until = Instant::now() + LENGTH;
        Self {
            // The page itself has just been loaded.
            next: event(inspector.clone(), view.clone(), PAUSE, until).boxed(),
            inspector,
            view,
            ticket,
            until,
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
        let Some((event_bytes, pause)) = ready!(self.next.poll_unpin(cx)) else {
            // Its future has ended, so it must not be polled again.
            self.next = futures_util::future::ready(None).boxed();
            return Poll::Ready(None);
        };
        self.ticket.waits_for_reader(true);
        let (inspector, view) = (self.inspector.clone(), self.view.clone());
        self.next = event(inspector, view, pause, self.until).boxed();
        Poll::Ready(Some(Ok(Frame::data(event_bytes))))
    }
}

/// The next event, and the pause after it. `None` at the end of the stream.
async fn event(
    inspector: Inspector,
    view: View,
    pause: Duration,
    until: Instant,
) -> Option<(Bytes, Duration)> {
    let loaded = async {
        sleep(pause).await;
        let _reading = inspector.streams.reading.acquire().await;
        let since = Instant::now();
        let content = Content::load(&inspector.locks, &view).await;
        (content, PAUSE.max(since.elapsed() * REST))
    };
    let (content, pause) = timeout_at(until, loaded).await.ok()?;
    let html = html::live(&view, &content, inspector.may_revoke).into_string();
    let mut event = String::with_capacity(html.len() + 8);
    for line in html.split(['\r', '\n']) {
        let _ = writeln!(event, "data:{line}");
    }
    event.push('\n');
    Some((event.into(), pause))
}

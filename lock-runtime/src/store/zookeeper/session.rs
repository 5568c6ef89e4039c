//! A session with one server: calls in order over one connection.

use std::{
    collections::VecDeque,
    io,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{mpsc, oneshot},
    time::{sleep, timeout},
};

use super::{
    calls::seen::Seen,
    error,
    jute::{self, Change, Changed, EVENT, Node, PING, Reader, Request, USER},
};
use crate::{
    shell::{sync::lock, time::Instant},
    store::{StoreError, StoreErrorKind},
};

/// The time after its latest sign of life for which a server keeps a session. Nothing but the nodes
/// for messages depends on it.
const LASTS: Duration = Duration::from_secs(10);
/// The pause between two signs of life.
const PING_AFTER: Duration = Duration::from_secs(2);
/// The time without a reply after which a connection counts as broken.
const SILENCE: Duration = Duration::from_secs(5);
/// The longest request. A server closes a connection with a longer one (`jute.maxbuffer`).
const LONGEST: usize = 1_000_000;
/// The longest reply: many times what a server sends.
const LONGEST_REPLY: usize = 64 << 20;

type Pending = Mutex<VecDeque<(i32, oneshot::Sender<Answer>)>>;

/// The error of a reply, and its content.
type Answer = (i32, Vec<u8>);

/// A session. Its connection closes when it is dropped.
pub(super) struct Session {
    pub(super) server: String,
    begun: Instant,
    calls: mpsc::UnboundedSender<(Request, oneshot::Sender<Answer>)>,
    state: Arc<SessionState>,
    events: Mutex<Option<mpsc::UnboundedReceiver<String>>>,
    seen: Mutex<Seen>,
}

struct SessionState {
    begun: Instant,
    /// When the latest reply came, in microseconds since the beginning.
    heard: AtomicI64,
    pending: Pending,
}

impl SessionState {
    fn heard(&self) -> Instant {
        let micros = self.heard.load(Ordering::Relaxed);
        self.begun + Duration::from_micros(u64::try_from(micros).unwrap_or(0))
    }

    fn hear(&self) {
        let micros = i64::try_from(self.begun.elapsed().as_micros()).unwrap_or(i64::MAX);
        self.heard.store(micros, Ordering::Relaxed);
    }
}

impl Session {
    pub(super) async fn begin(
        server: &str,
        user: Option<&str>,
        limit: Duration,
    ) -> Result<Self, StoreError> {
        let begun = async {
            let begun = async {
                let mut stream = TcpStream::connect(server).await?;
                greet(&mut stream).await?;
                Ok(stream)
            };
            let begun: io::Result<_> = begun.await;
            begun.map_err(|cause| match cause.kind() {
                io::ErrorKind::UnexpectedEof
                | io::ErrorKind::ConnectionReset
                | io::ErrorKind::BrokenPipe => {
                    let cause = "it has closed the connection: it has no quorum, or too many connections \
                                 (`maxClientCnxns`), or it is no server of ZooKeeper";
                    error::unconnected(server, cause)
                }
                _ => error::unconnected(server, cause),
            })
        };
        let late = |_| {
            Err(error::unconnected(
                server,
                format!("no reply within {limit:?}"),
            ))
        };
        let stream = timeout(limit, begun).await.unwrap_or_else(late)?;
        let begun = Instant::now();
        let state = Arc::new(SessionState {
            begun,
            heard: AtomicI64::new(0),
            pending: Mutex::default(),
        });
        let (calls, requested) = mpsc::unbounded_channel();
        let (event, events) = mpsc::unbounded_channel();
        let (read, write) = stream.into_split();
        let of_task = state.clone();
        let user = user.map(|user| Request::Authenticate { user: user.into() });
        tokio::spawn(async move {
            tokio::select! {
                _ = send(&of_task, write, requested, user) => {}
                _ = receive(&of_task, read, &event) => {}
            }
            // Wakes the callers.
            let pending = std::mem::take(&mut *lock(&of_task.pending));
            drop(pending);
        });
        Ok(Self {
            server: server.to_owned(),
            begun,
            calls,
            state,
            events: Mutex::new(Some(events)),
            seen: Mutex::default(),
        })
    }

    pub(super) fn is_over(&self) -> bool {
        self.calls.is_closed()
    }

    /// Returns whether the server has been silent since then, and is not new.
    pub(super) fn is_silent_since(&self, sent: Instant) -> bool {
        self.state.heard() < sent && sent > self.begun
    }

    pub(super) fn seen(&self) -> MutexGuard<'_, Seen> {
        lock(&self.seen)
    }

    /// Waits for the end of the connection.
    pub(super) async fn over(&self) {
        self.calls.closed().await;
    }

    /// Returns the paths of nodes whose watches have fired. Only once.
    pub(super) fn events(&self) -> Option<mpsc::UnboundedReceiver<String>> {
        lock(&self.events).take()
    }

    /// Sends a request at once, and returns the reply. Requests are executed in their order.
    fn call(&self, request: Request) -> impl Future<Output = Result<Answer, StoreError>> + use<> {
        let (sender, reply) = oneshot::channel();
        let is_sent = self.calls.send((request, sender)).is_ok();
        let server = self.server.clone();
        async move {
            let reply = reply.await;
            reply.map_err(|_| error::lost(&server).with_unsent(!is_sent))
        }
    }

    /// Returns a node, if there is one.
    pub(super) fn get(
        &self,
        path: &str,
        watch: bool,
    ) -> impl Future<Output = Result<Option<Node>, StoreError>> + use<> {
        let (path, server) = (path.to_owned(), self.server.clone());
        let reply = self.call(Request::Get { path, watch });
        async move {
            match reply.await? {
                (0, content) => Reader(&content).node().map(Some),
                (error::NO_NODE, _) => Ok(None),
                (code, _) => Err(error::of_call(&server, code)),
            }
        }
    }

    /// Returns the names of the children of a node, if it exists.
    pub(super) fn children(
        &self,
        path: &str,
        watch: bool,
    ) -> impl Future<Output = Result<Option<Vec<String>>, StoreError>> + use<> {
        let (path, server) = (path.to_owned(), self.server.clone());
        let reply = self.call(Request::Children { path, watch });
        async move {
            match reply.await? {
                (0, content) => Reader(&content).texts().map(Some),
                (error::NO_NODE, _) => Ok(None),
                (code, _) => Err(error::of_call(&server, code)),
            }
        }
    }

    /// Makes a change. Returns the code of the error if it was refused.
    pub(super) fn change(
        &self,
        change: Change,
    ) -> impl Future<Output = Result<Result<(), i32>, StoreError>> + use<> {
        let reply = self.call(Request::Change(change));
        async move {
            let (code, _) = reply.await?;
            Ok(if code == 0 { Ok(()) } else { Err(code) })
        }
    }

    /// Makes all changes or none.
    pub(super) fn multi(
        &self,
        changes: Vec<Change>,
    ) -> impl Future<Output = Result<Changed, StoreError>> + use<> {
        let request = Request::Multi(changes);
        let length = request.frame(0).len();
        let server = self.server.clone();
        let reply = (length <= LONGEST).then(|| self.call(request));
        async move {
            let Some(reply) = reply else {
                let text = format!(
                    "ZooKeeper at {server}: a request of {length} bytes; it accepts {LONGEST}: use fewer keys at \
                     once, or let fewer processes wait for one lock"
                );
                let error = StoreError::new(StoreErrorKind::Unsupported, text);
                return Err(error.with_unsent(true));
            };
            match reply.await? {
                (0, content) => Reader(&content).multi(),
                (code, _) => Ok(Err((0, code))),
            }
        }
    }
}

async fn greet(stream: &mut TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let millis = i32::try_from(LASTS.as_millis()).unwrap_or(i32::MAX);
    stream.write_all(&jute::hello(millis)).await?;
    frame(stream).await.map(drop)
}

/// Reads one frame.
async fn frame(from: &mut (impl tokio::io::AsyncRead + Unpin)) -> io::Result<Vec<u8>> {
    let length = from.read_u32().await? as usize;
    if length > LONGEST_REPLY {
        let text = "the reply is not one of ZooKeeper";
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    let mut content = Vec::new();
    let mut from = from.take(length as u64);
    if from.read_to_end(&mut content).await? < length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(content)
}

/// Sends requests until the session is dropped or the connection is broken.
async fn send(
    state: &SessionState,
    mut write: OwnedWriteHalf,
    mut requested: mpsc::UnboundedReceiver<(Request, oneshot::Sender<Answer>)>,
    user: Option<Request>,
) -> io::Result<()> {
    if let Some(user) = user {
        write.write_all(&user.frame(USER)).await?;
    }
    let mut number = 0;
    loop {
        let first = tokio::select! {
            first = requested.recv() => first,
            () = sleep(PING_AFTER) => {
                write.write_all(&Request::Ping.frame(PING)).await?;
                continue;
            }
        };
        let Some(first) = first else {
            return write.write_all(&Request::Close.frame(number)).await;
        };
        let mut frames = Vec::new();
        let mut next = Some(first);
        while let Some((request, reply)) = next {
            number = if number == i32::MAX { 1 } else { number + 1 };
            frames.extend(request.frame(number));
            lock(&state.pending).push_back((number, reply));
            next = requested.try_recv().ok();
        }
        write.write_all(&frames).await?;
    }
}

/// Passes replies on until the connection is broken.
async fn receive(
    state: &SessionState,
    mut read: OwnedReadHalf,
    events: &mpsc::UnboundedSender<String>,
) -> Result<(), StoreError> {
    loop {
        let Ok(Ok(content)) = timeout(SILENCE, frame(&mut read)).await else {
            return Ok(());
        };
        state.hear();
        let mut reader = Reader(&content);
        let number = reader.int()?;
        reader.long()?;
        let code = reader.int()?;
        match number {
            PING => {}
            EVENT => {
                let (_kind, _state) = (reader.int()?, reader.int()?);
                let _ = events.send(reader.text()?);
            }
            // Calls with a user that is unknown are refused.
            USER if code == 0 => {}
            USER => return Err(error::no_reply()),
            _ => {
                let next = lock(&state.pending).pop_front();
                match next {
                    Some((expected, reply)) if expected == number => {
                        let _ = reply.send((code, reader.0.to_vec()));
                    }
                    _ => return Err(error::no_reply()),
                }
            }
        }
    }
}

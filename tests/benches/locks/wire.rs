//! The least that a lock may cost: `SET key token NX PX`, then a script that compares and deletes.
//! There are no fencing tokens, no wait queue and no deadline.
//!
//! As `wire`, the commands are encoded by hand and go over one plain socket, which all tasks share;
//! as `wire redis-rs`, they go over a connection of that crate.

use std::{
    collections::VecDeque,
    net::SocketAddr,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard},
};

use futures_util::{StreamExt as _, stream::FuturesUnordered};
use lock_runtime::store::Token;
use redis::{Cmd, Value, aio::MultiplexedConnection};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{Notify, oneshot},
};

use crate::{
    contest::Contest,
    subject::{LEASE, Subject},
};

pub(crate) const WIRE: &str = "wire";
const WIRE_REDIS_RS: &str = "wire redis-rs";

const DELETE: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0";

/// The connections to each server, of both kinds.
pub(crate) struct Wires {
    sockets: Loaded<Socket>,
    connections: Loaded<MultiplexedConnection>,
}

/// Connections, each with the digest of the script.
type Loaded<L> = Vec<(L, String)>;

impl Wires {
    /// Loads the script on the servers.
    pub(crate) async fn connect<'a>(
        servers: impl IntoIterator<Item = (SocketAddr, &'a MultiplexedConnection)>,
    ) -> Self {
        let (mut sockets, mut connections) = (Vec::new(), Vec::new());
        for (address, connection) in servers {
            let socket = Socket::connect(address).await;
            let digest = socket.load().await;
            sockets.push((socket, digest.clone()));
            connections.push((connection.clone(), digest));
        }
        Self {
            sockets,
            connections,
        }
    }

    /// Adds both subjects. `place` returns the servers and the key of a task.
    pub(crate) fn compete<'a>(
        &'a self,
        contest: Contest<'a>,
        place: impl Fn(usize) -> (Range<usize>, String) + Copy + 'a,
    ) -> Contest<'a> {
        contest
            .each(WIRE, move |task| BareLock::new(&self.sockets, place(task)))
            .each(WIRE_REDIS_RS, move |task| {
                BareLock::new(&self.connections, place(task))
            })
    }
}

/// A connection that is shared by all tasks.
trait Line: Clone + Send + Sync + 'static {
    /// A command on its way.
    type Call: Send + 'static;

    fn call(&self, command: &[&[u8]]) -> Self::Call;

    /// Returns whether the command took effect.
    fn reply(call: Self::Call) -> impl Future<Output = bool> + Send;
}

/// A plain socket. Commands that are made while others are written go out together.
#[derive(Clone)]
struct Socket {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    unsent: Mutex<Unsent>,
    work: Notify,
}

#[derive(Default)]
struct Unsent {
    bytes: Vec<u8>,
    /// The tasks that await replies, in the order of their commands.
    waiting: VecDeque<oneshot::Sender<Vec<u8>>>,
}

impl Shared {
    fn unsent(&self) -> MutexGuard<'_, Unsent> {
        self.unsent
            .lock()
            .expect("no task panics while it holds the mutex")
    }
}

impl Socket {
    async fn connect(address: SocketAddr) -> Self {
        let socket = TcpStream::connect(address)
            .await
            .expect("our own server listens");
        socket
            .set_nodelay(true)
            .expect("a TCP socket has this option");
        let (read, write) = socket.into_split();
        let shared = Arc::<Shared>::default();
        tokio::spawn(write_all(write, shared.clone()));
        tokio::spawn(read_all(read, shared.clone()));
        Self { shared }
    }

    /// Loads the script that deletes a key. Returns its digest.
    async fn load(&self) -> String {
        let reply = self.call(&[b"SCRIPT", b"LOAD", DELETE.as_bytes()]).await;
        let reply = String::from_utf8(reply.expect("the server replies")).expect("a digest");
        let digest = reply.lines().nth(1).expect("the script is valid");
        digest.to_owned()
    }
}

fn encode(bytes: &mut Vec<u8>, command: &[&[u8]]) {
    bytes.extend_from_slice(format!("*{}\r\n", command.len()).as_bytes());
    for part in command {
        bytes.extend_from_slice(format!("${}\r\n", part.len()).as_bytes());
        bytes.extend_from_slice(part);
        bytes.extend_from_slice(b"\r\n");
    }
}

async fn write_all(mut socket: OwnedWriteHalf, shared: Arc<Shared>) {
    loop {
        let bytes = std::mem::take(&mut shared.unsent().bytes);
        if bytes.is_empty() {
            shared.work.notified().await;
        } else if socket.write_all(&bytes).await.is_err() {
            return;
        }
    }
}

async fn read_all(mut socket: OwnedReadHalf, shared: Arc<Shared>) {
    let mut bytes = Vec::with_capacity(64 * 1024);
    while socket.read_buf(&mut bytes).await.is_ok_and(|read| read > 0) {
        let mut start = 0;
        while let Some(end) = reply_end(&bytes[start..]) {
            let waiting = shared.unsent().waiting.pop_front();
            let waiting = waiting.expect("every reply belongs to a command");
            // The task may have ended with the round.
            let _ = waiting.send(bytes[start..start + end].to_vec());
            start += end;
        }
        bytes.drain(..start);
    }
}

/// The length of the first reply, if it is complete: a line, and the text that a `$` announces.
fn reply_end(bytes: &[u8]) -> Option<usize> {
    let line = bytes.iter().position(|byte| *byte == b'\n')? + 1;
    let text = match bytes.first()? {
        b'$' => std::str::from_utf8(&bytes[1..line])
            .expect("a length is a number")
            .trim_end()
            .parse::<usize>()
            .map_or(0, |length| length + 2),
        _ => 0,
    };
    (bytes.len() >= line + text).then_some(line + text)
}

impl Line for Socket {
    type Call = oneshot::Receiver<Vec<u8>>;

    fn call(&self, command: &[&[u8]]) -> Self::Call {
        let (sender, reply) = oneshot::channel();
        let mut unsent = self.shared.unsent();
        encode(&mut unsent.bytes, command);
        unsent.waiting.push_back(sender);
        drop(unsent);
        self.shared.work.notify_one();
        reply
    }

    async fn reply(call: Self::Call) -> bool {
        let reply = call.await.expect("the server replies");
        assert_ne!(reply.first(), Some(&b'-'), "{}", reply.escape_ascii());
        matches!(&reply[..], b"+OK\r\n" | b":1\r\n")
    }
}

impl Line for MultiplexedConnection {
    type Call = (Self, Cmd);

    fn call(&self, command: &[&[u8]]) -> Self::Call {
        let mut call = Cmd::new();
        for part in command {
            call.arg(*part);
        }
        (self.clone(), call)
    }

    async fn reply((mut connection, call): Self::Call) -> bool {
        let reply: Value = call
            .query_async(&mut connection)
            .await
            .expect("the server replies");
        matches!(reply, Value::Okay | Value::Int(1))
    }
}

/// A lock on one server, or on several by majority.
struct BareLock<L> {
    lines: Loaded<L>,
    key: String,
}

impl<L: Line> BareLock<L> {
    fn new(lines: &Loaded<L>, (servers, key): (Range<usize>, String)) -> Self {
        Self {
            lines: lines[servers].to_vec(),
            key,
        }
    }

    /// Waits until the command has taken effect on a majority of the servers.
    async fn on_majority(&self, call: impl Fn(&L, &str) -> L::Call) {
        if let [(line, digest)] = &self.lines[..] {
            let has_effect = L::reply(call(line, digest)).await;
            assert!(has_effect, "no other task uses this key");
            return;
        }
        let calls = self.lines.iter();
        let calls = calls.map(|(line, digest)| L::reply(call(line, digest)));
        let mut replies: FuturesUnordered<_> = calls.collect();
        for _ in 0..=self.lines.len() / 2 {
            assert_eq!(replies.next().await, Some(true), "no other task uses it");
        }
        // Commands dropped before they are written would not be sent.
        tokio::spawn(async move { while replies.next().await.is_some() {} });
    }
}

impl<L: Line> Subject for BareLock<L> {
    type Guard = [u8; 32];

    async fn acquire(&self) -> [u8; 32] {
        let token = Token::random().to_hex();
        let lease = LEASE.as_millis().to_string();
        self.on_majority(|line, _| {
            let key = self.key.as_bytes();
            line.call(&[b"SET", key, &token, b"NX", b"PX", lease.as_bytes()])
        })
        .await;
        token
    }

    async fn release(&self, token: [u8; 32]) {
        self.on_majority(|line, digest| {
            let key = self.key.as_bytes();
            line.call(&[b"EVALSHA", digest.as_bytes(), b"1", key, &token])
        })
        .await;
    }
}

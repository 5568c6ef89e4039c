//! A TCP proxy on loopback between a client and a Redis server, with faults that can be switched
//! while it runs.
//!
//! It parses the Redis protocol (plain, not TLS), so a fault affects whole messages, and "the next
//! reply" is exactly the reply to the next command, independent of other commands in flight. With
//! all faults, a connection that has lost bytes never carries later ones, as on a real network. It
//! is closed, at once or when the fault ends. Only published messages may be lost alone: no server
//! guarantees their delivery.
//!
//! Of other protocols it knows no messages: "the next reply" is then what the server sends next.
//!
//! Subscriptions over version 2 of the protocol work, but their confirmations count as replies:
//! tests that drop replies and subscribe use version 3 (`?protocol=resp3`).

mod connection;

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use tokio::{
    net::{TcpListener, TcpStream},
    sync::watch,
    task::{JoinHandle, JoinSet},
    time::sleep,
};
use url::Url;

use self::connection::{Connection, Framing};
use crate::{RedisServer, ports::free_port};

/// Commands that a client sends by itself when it connects; "the next command" excludes them.
const HANDSHAKE: [&str; 4] = ["AUTH", "CLIENT", "HELLO", "SELECT"];

/// A running proxy; dropping it closes its port and all its connections.
#[derive(Debug)]
pub struct Proxy {
    shared: Arc<Shared>,
    upstream: Url,
    port: u16,
    accepting: JoinHandle<()>,
}

/// Direction of the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Commands.
    ToServer,
    /// Replies and pushes.
    ToClient,
}

/// Replies to lose, and the fate of their connections.
///
/// By default the reply to the next command is lost and its connection closed: the client learns at
/// once that the outcome is unknown. The command itself always reaches the server.
#[derive(Clone, Debug)]
pub struct DropReply {
    command: Option<String>,
    times: u32,
    then: Then,
}

impl DropReply {
    /// Loses the reply to the next command that is not part of the handshake (AUTH, CLIENT, HELLO,
    /// SELECT).
    #[must_use]
    pub fn next() -> Self {
        Self {
            command: None,
            times: 1,
            then: Then::Close,
        }
    }

    /// Loses only replies to this command, for example `EVALSHA`.
    #[must_use]
    pub fn to(mut self, command: &str) -> Self {
        self.command = Some(command.to_ascii_uppercase());
        self
    }

    /// Loses the replies to the next `times` such commands.
    #[must_use]
    pub fn times(mut self, times: u32) -> Self {
        self.times = times;
        self
    }

    /// Keeps the connection open without any further data to the client, until
    /// [`Proxy::let_through`] or [`Proxy::cut`] closes it: the client notices by a time-out only.
    #[must_use]
    pub fn silently(mut self) -> Self {
        self.then = Then::Silence;
        self
    }

    fn hits(&mut self, name: &str) -> bool {
        let hit = self.times > 0
            && self
                .command
                .as_deref()
                .map_or(!HANDSHAKE.contains(&name), |only| only == name);
        self.times -= u32::from(hit);
        hit
    }
}

impl Proxy {
    /// A proxy to `server`.
    pub async fn to(server: &RedisServer) -> Self {
        Self::to_url(&server.url()).await
    }

    /// A proxy to the server of a plain URL on loopback.
    ///
    /// # Panics
    /// When the URL has no port, or no port can be bound.
    pub async fn to_url(url: &str) -> Self {
        let upstream = Url::parse(url).expect("a URL");
        let framing = match upstream.scheme() {
            "redis" => Framing::Redis,
            _ => Framing::Any,
        };
        let target = (
            Ipv4Addr::LOCALHOST,
            upstream.port().expect("a URL with a port"),
        )
            .into();
        let (listener, port) = loop {
            let port = free_port();
            match TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await {
                Ok(listener) => break (listener, port),
                // Another process has bound it in the meantime.
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                Err(error) => panic!("cannot listen on 127.0.0.1:{port}: {error}"),
            }
        };
        let shared = Arc::new(Shared::default());
        let accepting = tokio::spawn(accept(shared.clone(), listener, port, target, framing));
        Self {
            shared,
            upstream,
            port,
            accepting,
        }
    }

    /// URL of the server through the proxy.
    pub fn url(&self) -> String {
        self.through(&self.upstream)
    }

    /// Another URL of the same server (another user, another database) through the proxy.
    ///
    /// # Panics
    /// When it is not a URL.
    pub fn url_for(&self, url: &str) -> String {
        self.through(&Url::parse(url).expect("a URL"))
    }

    /// The address that clients connect to.
    pub fn addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// Loses the reply to the next command, which the server executes, and closes its connection.
    pub fn drop_next_reply(&self) {
        self.drop_reply(DropReply::next());
    }

    /// Loses replies to commands sent from now on; replaces an earlier call.
    pub fn drop_reply(&self, drop: DropReply) {
        self.shared
            .faults
            .send_modify(|faults| faults.drop = Some(drop));
    }

    /// Loses all replies on all connections until [`let_through`](Self::let_through); the server
    /// executes the commands.
    pub fn drop_all_replies(&self) {
        self.shared
            .faults
            .send_modify(|faults| faults.flow = Flow::NoReplies);
    }

    /// Accepts connections and swallows all data in both directions until
    /// [`let_through`](Self::let_through).
    pub fn black_hole(&self) {
        self.shared
            .faults
            .send_modify(|faults| faults.flow = Flow::Nothing);
    }

    /// Loses all published messages, and nothing else, until [`let_through`](Self::let_through): as
    /// if the server had not published them. The connections stay intact.
    pub fn drop_messages(&self) {
        self.shared
            .faults
            .send_modify(|faults| faults.drop_messages = true);
    }

    /// Delays all data that is read from now on; order and bandwidth are unchanged.
    pub fn delay(&self, direction: Direction, delay: Duration) {
        self.shared.faults.send_modify(|faults| match direction {
            Direction::ToServer => faults.delay_to_server = delay,
            Direction::ToClient => faults.delay_to_client = delay,
        });
    }

    /// Closes all connections; no message passes through them after the return. New ones are
    /// accepted.
    pub fn cut(&self) {
        self.shared.faults.send_modify(|faults| faults.cuts += 1);
    }

    /// Closes the port: after the return, the system refuses new connections until
    /// [`let_through`](Self::let_through). Open ones go on; [`cut`](Self::cut) closes them.
    pub async fn refuse(&self) {
        self.shared
            .faults
            .send_modify(|faults| faults.refuse = true);
        self.listening(false).await;
    }

    /// Ends every fault. Connections that have lost something are closed, all others go on.
    pub async fn let_through(&self) {
        self.shared.faults.send_modify(|faults| {
            *faults = Faults {
                cuts: faults.cuts,
                heals: faults.heals + 1,
                ..Faults::default()
            };
        });
        self.listening(true).await;
    }

    /// Number of replies lost so far.
    pub fn dropped_replies(&self) -> u64 {
        *self.shared.dropped.borrow()
    }

    /// Waits until at least `count` replies were lost since the start: then the server has executed
    /// their commands.
    pub async fn wait_for_dropped_replies(&self, count: u64) {
        let mut dropped = self.shared.dropped.subscribe();
        let _ = dropped.wait_for(|dropped| *dropped >= count).await;
    }

    /// Number of published messages lost to [`drop_messages`](Self::drop_messages) so far.
    pub fn dropped_messages(&self) -> u64 {
        *self.shared.dropped_messages.borrow()
    }

    /// Number of connections accepted so far.
    pub fn accepted_connections(&self) -> u64 {
        *self.shared.accepted.borrow()
    }

    /// Waits until at least `count` connections were accepted since the start.
    pub async fn wait_for_accepted_connections(&self, count: u64) {
        let mut accepted = self.shared.accepted.subscribe();
        let _ = accepted.wait_for(|accepted| *accepted >= count).await;
    }

    async fn listening(&self, wanted: bool) {
        let mut listening = self.shared.listening.subscribe();
        let _ = listening.wait_for(|listening| *listening == wanted).await;
    }

    fn through(&self, url: &Url) -> String {
        let mut url = url.clone();
        let _ = url.set_port(Some(self.port));
        url.into()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // This task owns those of all connections.
        self.accepting.abort();
    }
}

#[derive(Debug)]
struct Shared {
    faults: watch::Sender<Faults>,
    listening: watch::Sender<bool>,
    dropped: watch::Sender<u64>,
    dropped_messages: watch::Sender<u64>,
    accepted: watch::Sender<u64>,
}

impl Default for Shared {
    fn default() -> Self {
        let [dropped, dropped_messages, accepted] = std::array::from_fn(|_| watch::Sender::new(0));
        Self {
            faults: watch::Sender::default(),
            listening: watch::Sender::new(true),
            dropped,
            dropped_messages,
            accepted,
        }
    }
}

#[derive(Clone, Debug, Default)]
struct Faults {
    flow: Flow,
    refuse: bool,
    delay_to_server: Duration,
    delay_to_client: Duration,
    drop: Option<DropReply>,
    drop_messages: bool,
    /// Number of calls of `cut`: a connection from before the last one must close.
    cuts: u64,
    /// Number of calls of `let_through`: a connection with a loss before the last one must close.
    heals: u64,
}

#[derive(Clone, Copy, Debug, Default)]
enum Flow {
    #[default]
    Both,
    NoReplies,
    Nothing,
}

#[derive(Clone, Copy, Debug)]
enum Then {
    Close,
    Silence,
}

async fn accept(
    shared: Arc<Shared>,
    listener: TcpListener,
    port: u16,
    target: SocketAddr,
    framing: Framing,
) {
    let mut listener = Some(listener);
    let mut connections = JoinSet::new();
    let mut faults = shared.faults.subscribe();
    loop {
        tokio::select! {
            biased;
            _ = faults.changed() => {
                if faults.borrow_and_update().refuse {
                    if let Some(listener) = listener.take() {
                        // A process that another test is starting has a copy of the socket until
                        // it executes its program: without this, the copy would go on listening.
                        let _ = rustix::net::shutdown(&listener, rustix::net::Shutdown::Both);
                    }
                } else if listener.is_none() {
                    listener = Some(listen_again(port).await);
                }
                shared.listening.send_replace(listener.is_some());
            }
            Some(_) = connections.join_next() => {}
            Some(Ok((client, _))) = accept_from(listener.as_ref()) => {
                let connection = Connection::new(shared.clone(), framing);
                shared.accepted.send_modify(|accepted| *accepted += 1);
                connections.spawn(async move { connection.run(client, target).await });
            }
        }
    }
}

async fn accept_from(
    listener: Option<&TcpListener>,
) -> Option<io::Result<(TcpStream, SocketAddr)>> {
    match listener {
        Some(listener) => Some(listener.accept().await),
        None => std::future::pending().await,
    }
}

/// Binds the port again: no other process uses it, but the system may take a moment to free it.
async fn listen_again(port: u16) -> TcpListener {
    loop {
        match TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await {
            Ok(listener) => return listener,
            Err(_) => sleep(Duration::from_millis(1)).await,
        }
    }
}

//! A client that knows format 1 and nothing later: the stored scripts by `EVAL`, with names and
//! values of keys that are written down here once more.

use std::time::{SystemTime, UNIX_EPOCH};

use futures_util::StreamExt as _;
use lock_runtime::{Mode, store::Token};
use lock_tests::RedisServer;
use redis::{
    FromRedisValue as _, Value,
    aio::{MultiplexedConnection, PubSub},
};
use tokio::time::timeout;

use super::{Duration, LONG};

/// The text of a script: its parts, one after the other.
macro_rules! script {
    (in_queue $part:literal) => {
        script!("clock" "fence" "holders" "standing" "line" $part)
    };
    ($($part:literal)+) => {
        concat!($(include_str!(concat!("../../../../fixtures/format-1/", $part, ".lua"))),+)
    };
}

/// The keys of a lock in format 1.
#[derive(Debug)]
pub(super) struct Names {
    lock: String,
    pub(super) fence: String,
    queue: String,
    is_permits: bool,
}

impl Names {
    pub(super) fn new(namespace: &str, key: &str, is_permits: bool) -> Self {
        let family = if is_permits { "permits:" } else { "" };
        let lock = format!("{namespace}:{family}{key}");
        let [fence, queue] = ["f", "q"].map(|side| match key.contains('{') {
            true => format!("{side}:{lock}"),
            false => format!("{{{lock}}}:{side}"),
        });
        Self {
            lock,
            fence,
            queue,
            is_permits,
        }
    }

    fn all(&self) -> [&str; 3] {
        [&self.lock, &self.fence, &self.queue]
    }
}

/// A reply: its words, and its numbers.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Reply {
    words: Vec<String>,
    numbers: Vec<i64>,
}

impl Reply {
    fn new(value: Value) -> Self {
        let (mut words, mut numbers) = (Vec::new(), Vec::new());
        for item in <Vec<Value>>::from_redis_value(value).unwrap() {
            match item {
                Value::Int(number) => numbers.push(number),
                text => words.push(String::from_redis_value(text).unwrap()),
            }
        }
        Self { words, numbers }
    }

    pub(super) fn word(&self) -> &str {
        &self.words[0]
    }

    fn fence(&self, place: usize) -> u64 {
        u64::try_from(self.numbers[place]).unwrap()
    }
}

/// One waiter or holder at a time.
pub(super) struct OldClient {
    connection: MultiplexedConnection,
    messages: PubSub,
    channel: String,
    token: String,
}

impl OldClient {
    pub(super) async fn connect(server: &RedisServer, namespace: &str) -> Self {
        let channel = format!("{namespace}:{}", token());
        let client = redis::Client::open(server.url()).unwrap();
        let mut messages = client.get_async_pubsub().await.unwrap();
        messages.subscribe(&channel).await.unwrap();
        Self {
            connection: server.connection().await.unwrap(),
            messages,
            channel,
            token: token(),
        }
    }

    async fn eval(&self, script: &str, keys: &[&str], arguments: &[&str]) -> Value {
        let mut command = redis::cmd("EVAL");
        command.arg(script).arg(keys.len()).arg(keys).arg(arguments);
        command
            .query_async(&mut self.connection.clone())
            .await
            .unwrap()
    }

    async fn on_all(&self, script: &str, names: &Names, arguments: &[&str]) -> Reply {
        Reply::new(self.eval(script, &names.all(), arguments).await)
    }

    /// Asks under a new token. The fencing token if it is granted at once.
    pub(super) async fn acquire(
        &mut self,
        names: &Names,
        mode: Mode,
        lease: Duration,
        queue: bool,
    ) -> (String, Option<u64>) {
        self.token = token();
        let deadline = SystemTime::now() + LONG;
        let deadline = deadline
            .duration_since(UNIX_EPOCH)
            .unwrap()
            .as_micros()
            .to_string();
        let arguments = [
            &*deadline,
            if queue { &self.channel } else { "" },
            &word(mode),
            &self.member(mode),
            &millis(lease),
            if mode == Mode::Shared { "" } else { "0" },
        ];
        let reply = self
            .on_all(
                script!("acquire_free" "clock" "fence" "holders" "standing" "line" "acquire"),
                names,
                &arguments,
            )
            .await;
        let granted = reply.word() == "granted";
        if granted {
            assert_eq!(
                reply.numbers[2..],
                [lease.as_millis() as i64, 0],
                "{reply:?}"
            );
        }
        (reply.word().to_owned(), granted.then(|| reply.fence(1)))
    }

    /// The fencing token, `None` while it waits.
    pub(super) async fn poll(&self, names: &Names, mode: Mode) -> Option<u64> {
        let arguments = [&*word(mode), &self.member(mode)];
        let reply = self
            .on_all(script!(in_queue "poll"), names, &arguments)
            .await;
        match reply.word() {
            "granted" => Some(reply.fence(0)),
            "queued" => None,
            _ => panic!("{reply:?}"),
        }
    }

    /// The fencing token of the message that the queue has granted it the lock.
    pub(super) async fn granted(&mut self, names: &Names, mode: Mode) -> u64 {
        let mut messages = self.messages.on_message();
        let message = loop {
            let message = timeout(LONG, messages.next()).await.expect("a message");
            let message: String = message.unwrap().get_payload().unwrap();
            // The lock is reserved, or done.
            if !message.starts_with("kept ") {
                break message;
            }
        };
        drop(messages);
        let words: Vec<_> = message.splitn(6, ' ').collect();
        let [found, member, fence, lease, spare, lock] = words[..] else {
            panic!("{message}")
        };
        assert_eq!(
            (found, member),
            (&*word(mode), &*self.member(mode)),
            "{message}"
        );
        assert_eq!((spare, lock), ("0", &*names.lock), "{message}");
        assert!(lease.parse::<u64>().unwrap() > 0, "{message}");
        fence.parse().unwrap()
    }

    /// The rest of the lease, in milliseconds.
    pub(super) async fn renew(&self, names: &Names, mode: Mode, lease: Duration) -> i64 {
        let (member, lease) = (self.member(mode), millis(lease));
        let left = match mode {
            Mode::Exclusive => {
                self.eval(script!("renew"), &[&names.lock], &[&member, &lease])
                    .await
            }
            mode => {
                let arguments = [&*word(mode), &member, &lease];
                self.eval(
                    script!("clock" "holders" "standing" "renew_share"),
                    &[&names.lock],
                    &arguments,
                )
                .await
            }
        };
        i64::from_redis_value(left).unwrap()
    }

    pub(super) async fn release(&self, names: &Names, mode: Mode) -> String {
        let script = match mode {
            Mode::Exclusive => {
                script!("release" "clock" "fence" "holders" "standing" "line" "hand_over")
            }
            _ => script!(in_queue "release_share"),
        };
        let reply = self.on_all(script, names, &[&self.member(mode), "0"]).await;
        reply.word().to_owned()
    }

    /// Releases, and asks again under a new token. The fencing token if nothing else waits.
    pub(super) async fn pass(&mut self, names: &Names, lease: Duration) -> Option<u64> {
        let next = token();
        let arguments = [&*self.token, &next, &millis(lease), "0", &self.channel];
        let reply = self
            .on_all(script!(in_queue "pass"), names, &arguments)
            .await;
        self.token = next;
        match reply.word() {
            "passed" => Some(reply.fence(0)),
            "queued" => None,
            _ => panic!("{reply:?}"),
        }
    }

    /// Makes a writer a reader: its fencing token.
    pub(super) async fn downgrade(&self, names: &Names) -> u64 {
        let reply = self
            .on_all(script!(in_queue "convert"), names, &[&self.token])
            .await;
        assert_eq!(reply.word(), "converted");
        reply.fence(0)
    }

    pub(super) async fn abandon(&self, names: &Names, mode: Mode) {
        let arguments = [&*word(mode), &self.member(mode)];
        self.on_all(script!(in_queue "abandon"), names, &arguments)
            .await;
    }

    /// The modes of the holders, and those of the waiters in their order.
    pub(super) async fn inspect(&self, names: &Names) -> (Vec<String>, Vec<String>) {
        let family = if names.is_permits { "permits" } else { "lock" };
        let mut reply = self
            .on_all(script!(in_queue "inspect"), names, &[family])
            .await;
        assert_eq!(reply.words.remove(0), "holders");
        let waiters = reply
            .words
            .split_off(usize::try_from(reply.numbers[1]).unwrap());
        (reply.words, waiters)
    }

    fn member(&self, mode: Mode) -> String {
        match mode {
            Mode::Permits(permits) => format!("{permits}:{}", self.token),
            _ => self.token.clone(),
        }
    }
}

pub(super) fn word(mode: Mode) -> String {
    match mode {
        Mode::Exclusive => "exclusive".to_owned(),
        Mode::Permits(permits) => permits.to_string(),
        _ => "shared".to_owned(),
    }
}

fn millis(duration: Duration) -> String {
    duration.as_millis().to_string()
}

fn token() -> String {
    Token::random().to_hex().map(char::from).iter().collect()
}

//! Random calls of the scripts, with foreign data, expiry, waiters whose connections are gone, and
//! a server that is out of memory.

use std::{collections::BTreeMap, fs, time::Duration};

use redis::Value;

use super::{Dice, START, Twins, connect};

/// The directory of the scripts.
const SCRIPTS: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../../lock-runtime/src/store/redis/script"
);
const ROUNDS: usize = 10_000;
const TOKENS: [&str; 4] = [
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb",
    "bbbbbbbbbbbbbbbbbbbbbbbbbbbb0001",
    "cccccccccccccccccccccccccccccccc",
];
/// The first two have a subscriber.
const CHANNELS: [&str; 4] = ["lock:1", "lock:2", "lock:3", "lock:4"];
const MARKER: &str = "1799000000000000 marker";

/// Reads the scripts: each is put together from several parts.
fn scripts() -> BTreeMap<String, &'static str> {
    let read = |path: String| fs::read_to_string(&path).unwrap_or_else(|_| panic!("{path}"));
    let source = read(format!("{SCRIPTS}/mod.rs"));
    let lines = source.lines().filter_map(|line| {
        let (name, parts) = line.trim().split_once(") = \"")?;
        let (name, _) = name.split_once('(')?;
        let parts = parts.strip_suffix(';')?.split(' ');
        let part = |part: &str| read(format!("{SCRIPTS}/lua/{}.lua", part.trim_matches('"')));
        let text: String = parts.map(part).collect();
        Some((name.to_owned(), &*text.leak()))
    });
    lines.collect()
}

struct Calls {
    dice: Dice,
    now: u64,
    /// The modes and members of the latest acquires.
    latest: Vec<[String; 2]>,
}

impl Calls {
    fn one(&mut self, of: &[&str]) -> String {
        self.dice.one(of).to_owned()
    }

    fn token(&mut self) -> String {
        self.one(&TOKENS)
    }

    /// The mode and the member of a late acquire, or others.
    fn member(&mut self) -> [String; 2] {
        let place = self.dice.below(5);
        match self.latest.iter().rev().nth(place) {
            Some(known) => known.clone(),
            None => self.new_member(),
        }
    }

    fn new_member(&mut self) -> [String; 2] {
        let mode = self.one(&["exclusive", "exclusive", "shared", "2", "3"]);
        let token = self.token();
        let member = match &mode[..1] {
            "2" | "3" => format!("{mode}:{token}"),
            _ => token,
        };
        [mode, member]
    }

    fn millis(&mut self) -> String {
        self.one(&["300", "1000", "5000", "20000"])
    }

    fn keep(&mut self) -> String {
        self.one(&["0", "0", "0", "700"])
    }

    /// A fencing token and a result.
    fn result(&mut self) -> [String; 2] {
        [
            self.now.to_string(),
            self.one(&["", "a result", "x.done 1"]),
        ]
    }

    /// Adds a result to some of the releases that keep the lock.
    fn may_record(&mut self, args: &mut Vec<String>) {
        if args.last().is_some_and(|keep| keep != "0") && self.dice.below(2) == 0 {
            args.extend(self.result());
        }
    }

    fn reserved(&mut self) -> String {
        self.one(&["0", "0", "3"])
    }

    fn deadline(&mut self) -> String {
        let late = self.dice.below(20) == 0;
        (self.now + 1_000_000 - if late { 1_000_001 } else { 0 }).to_string()
    }

    fn marker(&mut self) -> String {
        let is_strange = self.dice.below(20) == 0;
        if is_strange { "other" } else { MARKER }.to_owned()
    }

    /// A number that is proposed, 0 for none.
    fn proposal(&mut self) -> String {
        let ahead = [0, 5_000, 70_000_000][self.dice.below(3)];
        match self.dice.below(2) {
            0 => "0".to_owned(),
            _ => (self.now + ahead).to_string(),
        }
    }

    /// The keys of a lock: its own, its fence and its queue.
    fn lock(&mut self) -> [String; 3] {
        let lock = self.one(&["lock:a", "lock:a", "lock:a", "lock:b"]);
        Self::keys(&lock)
    }

    fn keys(lock: &str) -> [String; 3] {
        [lock.to_owned(), format!("f:{lock}"), format!("q:{lock}")]
    }

    /// The name, the keys and the other arguments of a call.
    fn next(&mut self) -> (&'static str, Vec<String>, Vec<String>) {
        const NAMES: [&str; 28] = [
            "ACQUIRE",
            "ACQUIRE",
            "ACQUIRE",
            "ACQUIRE",
            "ACQUIRE",
            "ACQUIRE",
            "ACQUIRE_GROUP",
            "RELEASE_GROUP",
            "RECORD_GROUP",
            "RESULT",
            "RENEW_GROUP",
            "POLL",
            "POLL",
            "POLL",
            "RENEW",
            "RENEW_SHARE",
            "RELEASE",
            "RELEASE_SHARE",
            "PASS",
            "CONVERT",
            "ABANDON",
            "REPLICATE",
            "RAISE",
            "MARKER",
            "FREE",
            "INSPECT",
            "REVOKE",
            "SINCE",
        ];
        let name = self.dice.one(&NAMES);
        let keys = self.lock();
        let lock = keys[0].clone();
        let all = keys.to_vec();
        let [mode, member] = self.member();
        let marker_name = "f:lock:marker".to_owned();
        match name {
            "ACQUIRE" => self.acquire(),
            "ACQUIRE_GROUP" => {
                let other = self.lock();
                let pairs = keys.into_iter().zip(other);
                let mut keys: Vec<_> = pairs.flat_map(|(one, other)| [one, other]).collect();
                let mut args = Vec::new();
                for _ in 0..2 {
                    args.extend([self.deadline(), self.token(), self.millis()]);
                    args.extend([self.reserved(), self.proposal()]);
                }
                if self.dice.below(2) == 0 {
                    keys.push(marker_name);
                    args.push(self.marker());
                }
                (name, keys, args)
            }
            "RELEASE_GROUP" => {
                let other = self.lock();
                let keys = vec![lock, other[0].clone(), keys[2].clone(), other[2].clone()];
                (name, keys, vec![self.token(), self.token()])
            }
            "RECORD_GROUP" => {
                let other = self.lock();
                let keys = vec![lock, other[0].clone(), keys[2].clone(), other[2].clone()];
                let record = |calls: &mut Self| {
                    let [fence, result] = calls.result();
                    [calls.token(), calls.millis(), fence, result]
                };
                let args = [record(self), record(self)].concat();
                (name, keys, args)
            }
            "RESULT" => (name, vec![lock], Vec::new()),
            "RENEW_GROUP" => {
                let other = self.lock();
                let args = vec![self.token(), self.millis(), self.token(), self.millis()];
                (name, vec![lock, other[0].clone()], args)
            }
            "POLL" | "ABANDON" => (name, all, vec![mode, member]),
            "RENEW" | "RENEW_SHARE" => {
                let mut args = vec![member, self.millis()];
                let name = match &mode[..] {
                    "exclusive" => "RENEW",
                    _ => "RENEW_SHARE",
                };
                if name == "RENEW_SHARE" {
                    args.insert(0, mode);
                }
                if self.dice.below(4) == 0 {
                    args.push(self.millis());
                }
                (name, vec![lock], args)
            }
            "RELEASE" | "RELEASE_SHARE" => {
                let name = match &mode[..] {
                    "exclusive" => "RELEASE",
                    _ => "RELEASE_SHARE",
                };
                let mut args = vec![member, self.keep()];
                if name == "RELEASE" {
                    self.may_record(&mut args);
                }
                (name, all, args)
            }
            "PASS" => {
                let args = [self.token(), self.token(), self.millis(), self.reserved()];
                let channel = self.one(&CHANNELS);
                (name, all, args.into_iter().chain([channel]).collect())
            }
            "CONVERT" => (name, all, vec![member]),
            "REPLICATE" => (name, vec![lock], vec![mode, member]),
            "RAISE" => {
                let mut keys = vec![keys[1].clone()];
                let mut args = vec![(self.now + 5_000).to_string()];
                if self.dice.below(2) == 0 {
                    keys.push(marker_name);
                    args.push(self.marker());
                }
                (name, keys, args)
            }
            "MARKER" => {
                let keys = vec![marker_name, "f:lock:settings".to_owned()];
                (name, keys, vec!["name".to_owned(), "20000 x".to_owned()])
            }
            "FREE" => {
                let mut args = vec![mode, member, self.keep()];
                self.may_record(&mut args);
                (name, vec![lock], args)
            }
            "INSPECT" => {
                let kind = self.one(&["lock", "permits"]);
                let part = self.one(&["all", "holders", "waiters"]);
                let from = self.one(&["0", "1"]);
                (
                    name,
                    all,
                    vec![kind, "a".to_owned(), part, "0".to_owned(), from],
                )
            }
            "REVOKE" => {
                let kind = self.one(&["lock", "permits"]);
                let scope = self.one(&["leased", "endless"]);
                (name, all, vec![kind, scope, CHANNELS[0].to_owned()])
            }
            _ => {
                let keys = vec!["f:lock:grants:x".to_owned()];
                (
                    name,
                    keys,
                    vec![self.millis(), "id".to_owned(), "5".to_owned()],
                )
            }
        }
    }

    fn acquire(&mut self) -> (&'static str, Vec<String>, Vec<String>) {
        let count = 1 + self.dice.below(5) / 4;
        let (mut keys, mut args) = (Vec::new(), vec![self.deadline()]);
        args.push(match self.dice.below(4) {
            0 => String::new(),
            _ => self.one(&CHANNELS),
        });
        // No request names a lock twice.
        let [first, ..] = self.lock();
        for lock in [&first[..], "lock:c"].into_iter().take(count) {
            keys.extend(Self::keys(lock));
            let [mode, member] = match self.dice.below(3) {
                0 => self.member(),
                _ => self.new_member(),
            };
            self.latest.push([mode.clone(), member.clone()]);
            args.extend([mode.clone(), member, self.millis()]);
            args.push(match &mode[..] {
                "exclusive" => self.reserved(),
                "shared" if self.dice.below(2) == 0 => self.token(),
                "shared" => String::new(),
                _ => "0".to_owned(),
            });
        }
        if self.dice.below(3) == 0 {
            keys.push("f:lock:marker".to_owned());
            args.extend([self.marker(), self.proposal()]);
        }
        ("ACQUIRE", keys, args)
    }

    /// A command that leaves foreign data, or none.
    fn foreign(&mut self) -> Vec<String> {
        let key = self.dice.below(3);
        let key = self.lock()[key].clone();
        let words = self.one(&[
            "SET KEY word",
            "SET KEY 7",
            "HSET KEY x y",
            "HSET KEY ends 1",
            "ZADD KEY 1 x",
            "SET KEY 99999999999999999999",
            "PEXPIRE KEY 500",
        ]);
        words
            .split(' ')
            .map(|word| word.replace("KEY", &key))
            .collect()
    }
}

fn bytes(words: Vec<String>) -> Vec<Vec<u8>> {
    words.into_iter().map(String::into_bytes).collect()
}

#[tokio::test]
async fn scripts_do_what_they_do_on_a_server() {
    let scripts = scripts();
    let mut twins = Twins::start().await;
    let subscribed = &CHANNELS[..2];
    let mut connection = connect(&twins.server);
    let mut messages = connection.as_pubsub();
    let timeout = Some(Duration::from_secs(5));
    messages.set_read_timeout(timeout).expect("a time-out");
    for channel in subscribed {
        messages.subscribe(channel).expect("SUBSCRIBE");
        twins.keyspace.channels.push((*channel).to_owned());
    }
    let mut calls = Calls {
        dice: Dice(2),
        now: START,
        latest: Vec::new(),
    };
    let mut replies: BTreeMap<String, usize> = BTreeMap::new();
    let command = "return redis.call(unpack(ARGV))";
    for _ in 0..ROUNDS {
        calls.now = calls.dice.later(calls.now);
        twins.set_time(calls.now);
        match calls.dice.below(200) {
            0..2 => twins.set_full(true),
            2..12 => twins.set_full(false),
            12..14 => drop(twins.eval(command, &[], &bytes(calls.foreign()))),
            14..20 => {
                let words = ["SET", "f:lock:marker", MARKER].map(str::to_owned);
                twins.eval(command, &[], &bytes(words.to_vec()));
            }
            20..26 => {
                let words = [["DEL".to_owned()].as_slice(), &calls.lock()].concat();
                twins.eval(command, &[], &bytes(words));
            }
            _ => {}
        }
        let (name, keys, args) = calls.next();
        let reply = twins.eval(scripts[name], &bytes(keys), &bytes(args));
        *replies
            .entry(format!("{name} {}", kind(&reply)))
            .or_default() += 1;
        for (channel, message) in std::mem::take(&mut twins.keyspace.published) {
            if subscribed.iter().any(|it| it.as_bytes() == channel) {
                let received = messages.get_message().expect("a message");
                assert_eq!(received.get_channel_name().as_bytes(), channel);
                assert_eq!(received.get_payload_bytes(), message);
            }
        }
    }
    // Shown with `--nocapture`: what the calls have met.
    println!("{replies:#?}");
}

/// The first word of a reply, or its type.
fn kind(reply: &Value) -> String {
    match reply {
        Value::SimpleString(text) => text.clone(),
        Value::Array(words) => match words.first() {
            Some(Value::BulkString(word)) => {
                let reason = match words.get(3) {
                    Some(Value::BulkString(reason)) => String::from_utf8_lossy(reason),
                    _ => "".into(),
                };
                format!("{} {reason}", String::from_utf8_lossy(word))
            }
            _ => "list".to_owned(),
        },
        _ => "number".to_owned(),
    }
}

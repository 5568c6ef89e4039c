//! The same calls of scripts get the same replies from a keyspace and from a real server, and leave
//! the same data.

mod commands;
mod scripts;

use std::time::Duration;

use lock_tests::{RedisServer, ServerClock};
use redis::{Connection, ConnectionLike as _, Value};

use super::Keyspace;

/// The time at which both begin, in microseconds since 1970.
const START: u64 = 1_800_000_000_000_000;
/// Returns all keys of a server, as [`Keyspace::stored`] does.
const STORED: &str = "
local all = {}
for i, key in ipairs(redis.call('KEYS', '*')) do
  local kind, words = redis.call('TYPE', key).ok, nil
  if kind == 'string' then
    words = {redis.call('GET', key)}
  elseif kind == 'zset' then
    words = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
  else
    words = redis.call('HGETALL', key)
  end
  all[i] = {key, redis.call('PTTL', key), kind, words}
end
return all";

/// A key, its time to live in milliseconds, its type, and its data.
type Stored = (Vec<u8>, i64, String, Vec<Vec<u8>>);

/// A keyspace and a real server, with the same clock.
struct Twins {
    keyspace: Keyspace,
    server: RedisServer,
    connection: Connection,
    clock: ServerClock,
}

impl Twins {
    async fn start() -> Self {
        let clock = ServerClock::new();
        let server = RedisServer::builder().clock(&clock).start().await;
        let connection = connect(&server);
        let mut twins = Self {
            keyspace: Keyspace::default(),
            server,
            connection,
            clock,
        };
        twins.set_time(START);
        twins
    }

    fn set_time(&mut self, micros: u64) {
        self.keyspace.micros = micros;
        self.clock.stop_at(Duration::from_micros(micros));
    }

    /// Lets both be out of memory, or no longer.
    fn set_full(&mut self, is_full: bool) {
        self.keyspace.is_full = is_full;
        let most = if is_full { "1" } else { "0" };
        let mut command = redis::cmd("CONFIG");
        command.arg(["SET", "maxmemory", most].as_slice());
        command.exec(&mut self.connection).expect("CONFIG SET");
    }

    /// Executes a script on both. Panics unless both give the same reply and have the same data.
    fn eval(&mut self, text: &'static str, keys: &[Vec<u8>], args: &[Vec<u8>]) -> Value {
        let mut command = redis::cmd("EVAL");
        command.arg(text).arg(keys.len()).arg(keys).arg(args);
        let reply = self.connection.req_command(&command);
        let expected = reply.unwrap_or_else(|refused| {
            let text = format!("{} ", refused.code().unwrap_or("ERR"));
            super::keyspace::error(&text)
        });
        let reply = self.keyspace.eval(text, None, &slices(keys), &slices(args));
        let reply = comparable(reply);
        assert_eq!(reply, comparable(expected), "{}", shown(keys, args));
        let stored = redis::cmd("EVAL")
            .arg(STORED)
            .arg(0)
            .query(&mut self.connection);
        let mut stored: Vec<Stored> = stored.expect("a list of keys");
        stored.iter_mut().for_each(arrange);
        stored.sort();
        let mut ours = self.keyspace.stored();
        for (_, ttl, ..) in &mut ours {
            // The other one has been a number of Lua.
            *ttl = *ttl as f64 as i64;
        }
        assert_eq!(ours, stored, "{}", shown(keys, args));
        reply
    }
}

fn slices(words: &[Vec<u8>]) -> Vec<&[u8]> {
    words.iter().map(|word| &word[..]).collect()
}

fn connect(server: &RedisServer) -> Connection {
    let client = redis::Client::open(server.url()).expect("the URL of a server");
    client.get_connection().expect("a connection")
}

/// A hash has no order.
fn arrange((_, _, kind, words): &mut Stored) {
    if kind == "hash" {
        let mut pairs: Vec<_> = words.chunks(2).collect();
        pairs.sort();
        *words = pairs.concat();
    }
}

/// A reply with the code of an error only: its text depends on the server's version.
fn comparable(reply: Value) -> Value {
    match reply {
        Value::Okay => Value::SimpleString("OK".to_owned()),
        Value::ServerError(error) => Value::SimpleString(format!("error {}", error.code())),
        Value::Array(items) => Value::Array(items.into_iter().map(comparable).collect()),
        reply => reply,
    }
}

fn shown(keys: &[Vec<u8>], args: &[Vec<u8>]) -> String {
    let words = keys.iter().chain(args);
    let words: Vec<_> = words.map(|it| String::from_utf8_lossy(it)).collect();
    words.join(" ")
}

/// A small generator: the same calls each time.
struct Dice(u64);

impl Dice {
    fn below(&mut self, most: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % most
    }

    fn one<'a>(&mut self, of: &[&'a str]) -> &'a str {
        of[self.below(of.len())]
    }

    /// The next time: often the same millisecond, sometimes after the end of most keys.
    fn later(&mut self, micros: u64) -> u64 {
        micros
            + match self.below(20) {
                0 => self.below(12_000_000) as u64,
                1..=2 => self.below(1_000_000) as u64,
                4..=9 => self.below(3) as u64 * 1000,
                _ => self.below(700) as u64,
            }
    }
}

//! The keys of a server, and the commands on them.

use std::collections::{BTreeMap, btree_map::Entry};

use redis::Value;

const WRONG_TYPE: &str = "WRONGTYPE Operation against a key holding the wrong kind of value";
const SYNTAX: &str = "ERR syntax error";
const NO_INTEGER: &str = "ERR value is not an integer or out of range";
const INVALID_TIME: &str = "ERR invalid expire time";
const OUT_OF_MEMORY: &str = "OOM command not allowed when used memory > 'maxmemory'.";

type Bytes = Vec<u8>;
/// A reply, or the text of an error.
type Reply = Result<Value, &'static str>;

/// The data of a server.
#[derive(Clone, Debug, Default)]
pub struct Keyspace {
    keys: BTreeMap<Bytes, Key>,
    /// The server's clock, in microseconds since 1970.
    pub micros: u64,
    /// The channels with a subscriber, once for each.
    pub channels: Vec<String>,
    /// The messages of the scripts so far, each with its channel.
    pub published: Vec<(Bytes, Bytes)>,
    /// The server is out of memory.
    pub is_full: bool,
    /// The present script has written something, so the server no longer refuses for lack of
    /// memory.
    pub(crate) has_written: bool,
}

#[derive(Clone, Debug)]
struct Key {
    data: Data,
    /// In milliseconds since 1970. The key exists until that millisecond is over.
    expires: Option<i64>,
}

#[derive(Clone, Debug)]
enum Data {
    Text(Bytes),
    Hash(BTreeMap<Bytes, Bytes>),
    Set(BTreeMap<Bytes, f64>),
}

impl Data {
    fn kind(&self) -> &'static str {
        match self {
            Self::Text(_) => "string",
            Self::Hash(_) => "hash",
            Self::Set(_) => "zset",
        }
    }

    fn is_empty(&self) -> bool {
        match self {
            Self::Text(_) => false,
            Self::Hash(fields) => fields.is_empty(),
            Self::Set(members) => members.is_empty(),
        }
    }
}

/// The members of a sorted set in its order.
fn ranked(set: &BTreeMap<Bytes, f64>) -> Vec<(&Bytes, f64)> {
    let mut members: Vec<_> = set.iter().map(|(member, score)| (member, *score)).collect();
    // Members of the same score stay in the order of their names.
    members.sort_by(|one, other| one.1.total_cmp(&other.1));
    members
}

impl Keyspace {
    /// The text of a key, and when it expires in milliseconds since 1970.
    pub fn text(&self, key: &str) -> Option<(&[u8], Option<i64>)> {
        match self.get(key.as_bytes())? {
            Key {
                data: Data::Text(text),
                expires,
            } => Some((text, *expires)),
            _ => None,
        }
    }

    /// The members of a sorted set, each with its score.
    pub fn members(&self, key: &str) -> Vec<(&[u8], f64)> {
        match self.get(key.as_bytes()).map(|key| &key.data) {
            Some(Data::Set(set)) => ranked(set)
                .into_iter()
                .map(|(it, at)| (&**it, at))
                .collect(),
            _ => Vec::new(),
        }
    }

    /// The fields of a hash, each with its value.
    pub fn fields(&self, key: &str) -> Vec<(&[u8], &[u8])> {
        match self.get(key.as_bytes()).map(|key| &key.data) {
            Some(Data::Hash(fields)) => {
                fields.iter().map(|(it, value)| (&**it, &**value)).collect()
            }
            _ => Vec::new(),
        }
    }

    /// All keys, each with its time to live in milliseconds, its type and its data.
    #[cfg(test)]
    pub(crate) fn stored(&self) -> Vec<(Bytes, i64, String, Vec<Bytes>)> {
        let now = self.now();
        let keys = self
            .keys
            .keys()
            .filter_map(|name| Some((name, self.get(name)?)));
        let stored = keys.map(|(name, key)| {
            let words = match &key.data {
                Data::Text(text) => vec![text.clone()],
                Data::Hash(fields) => {
                    let pairs = fields
                        .iter()
                        .map(|(field, value)| [field.clone(), value.clone()]);
                    pairs.flatten().collect()
                }
                Data::Set(set) => {
                    let pairs = ranked(set).into_iter();
                    let pairs = pairs.map(|(member, score)| [member.clone(), written(score)]);
                    pairs.flatten().collect()
                }
            };
            let ttl = key.expires.map_or(-1, |at| at - now);
            (name.clone(), ttl, key.data.kind().to_owned(), words)
        });
        stored.collect()
    }

    /// Deletes everything.
    pub fn flush(&mut self) {
        self.keys.clear();
    }

    fn now(&self) -> i64 {
        (self.micros / 1000) as i64
    }

    fn get(&self, key: &[u8]) -> Option<&Key> {
        let now = self.now();
        self.keys
            .get(key)
            .filter(|key| key.expires.is_none_or(|at| now <= at))
    }

    fn get_mut(&mut self, key: &[u8]) -> Option<&mut Key> {
        let now = self.now();
        self.keys
            .get_mut(key)
            .filter(|key| key.expires.is_none_or(|at| now <= at))
    }

    fn hash(&self, key: &[u8]) -> Result<Option<&BTreeMap<Bytes, Bytes>>, &'static str> {
        match self.get(key).map(|key| &key.data) {
            None => Ok(None),
            Some(Data::Hash(fields)) => Ok(Some(fields)),
            Some(_) => Err(WRONG_TYPE),
        }
    }

    fn set(&self, key: &[u8]) -> Result<Option<&BTreeMap<Bytes, f64>>, &'static str> {
        match self.get(key).map(|key| &key.data) {
            None => Ok(None),
            Some(Data::Set(members)) => Ok(Some(members)),
            Some(_) => Err(WRONG_TYPE),
        }
    }

    /// The data of a key, which is created if it is missing.
    fn entry(&mut self, key: &[u8], empty: Data) -> &mut Data {
        let now = self.now();
        let key = match self.keys.entry(key.to_vec()) {
            Entry::Occupied(mut found) => {
                if found.get().expires.is_some_and(|at| now > at) {
                    found.insert(Key {
                        data: empty,
                        expires: None,
                    });
                }
                found.into_mut()
            }
            Entry::Vacant(place) => place.insert(Key {
                data: empty,
                expires: None,
            }),
        };
        &mut key.data
    }

    fn tidy(&mut self, key: &[u8]) {
        if self.keys.get(key).is_some_and(|key| key.data.is_empty()) {
            self.keys.remove(key);
        }
    }

    fn expire_at(&mut self, key: &[u8], at: i64) -> i64 {
        let now = self.now();
        let Some(found) = self.get_mut(key) else {
            return 0;
        };
        found.expires = Some(at);
        if at <= now {
            self.keys.remove(key);
        }
        1
    }

    /// Executes a command as it is within a script.
    pub fn execute(&mut self, words: &[Bytes]) -> Value {
        self.command(words).unwrap_or_else(error)
    }

    fn command(&mut self, words: &[Bytes]) -> Reply {
        let Some((name, args)) = words.split_first() else {
            return Err("ERR Please specify at least one argument for this redis.call() call");
        };
        let name = name.to_ascii_uppercase();
        let (least, most) = match &name[..] {
            b"TIME" => (0, 0),
            b"GET" | b"TYPE" | b"PTTL" => (1, 1),
            b"HGET" | b"ZSCORE" | b"PUBLISH" | b"SPUBLISH" => (2, 2),
            b"ZCOUNT" | b"ZREMRANGEBYSCORE" => (3, 3),
            b"PEXPIRE" | b"PEXPIREAT" => (2, 3),
            b"DEL" | b"MGET" | b"EXISTS" => (1, usize::MAX),
            b"SET" | b"HMGET" | b"HDEL" | b"ZREM" => (2, usize::MAX),
            b"HSET" | b"ZADD" | b"ZRANGE" | b"ZRANGEBYSCORE" => (3, usize::MAX),
            _ => return Err("ERR Unknown Redis command called from script"),
        };
        if args.len() < least || args.len() > most {
            return Err("ERR Wrong number of args calling Redis command from script");
        }
        let takes_memory = matches!(&name[..], b"SET" | b"HSET" | b"ZADD");
        if self.is_full && takes_memory && !self.has_written {
            return Err(OUT_OF_MEMORY);
        }
        self.has_written |= takes_memory
            || matches!(
                &name[..],
                b"DEL" | b"PEXPIRE" | b"PEXPIREAT" | b"HDEL" | b"ZREM" | b"ZREMRANGEBYSCORE"
            );
        let key = args.first().map_or(&b""[..], |key| key);
        Ok(match &name[..] {
            b"TIME" => {
                let parts = [self.micros / 1_000_000, self.micros % 1_000_000];
                Value::Array(parts.map(|part| bulk(part.to_string().as_bytes())).to_vec())
            }
            b"GET" => match self.get(key).map(|key| &key.data) {
                None => Value::Nil,
                Some(Data::Text(text)) => bulk(text),
                Some(_) => return Err(WRONG_TYPE),
            },
            b"MGET" => {
                let text = |key: &Bytes| match self.get(key).map(|key| &key.data) {
                    Some(Data::Text(text)) => bulk(text),
                    _ => Value::Nil,
                };
                Value::Array(args.iter().map(text).collect())
            }
            b"TYPE" => {
                let kind = self.get(key).map_or("none", |key| key.data.kind());
                Value::SimpleString(kind.to_owned())
            }
            b"EXISTS" => count(args.iter().filter(|key| self.get(key).is_some()).count()),
            b"DEL" => {
                let mut deleted = 0;
                for key in args {
                    deleted += usize::from(self.get(key).is_some());
                    self.keys.remove(key);
                }
                count(deleted)
            }
            b"PTTL" => Value::Int(match self.get(key) {
                None => -2,
                Some(Key { expires: None, .. }) => -1,
                Some(Key {
                    expires: Some(at), ..
                }) => (at - self.now()).max(0),
            }),
            b"PEXPIRE" | b"PEXPIREAT" => {
                let time = integer(&args[1]).ok_or(NO_INTEGER)?;
                let from = if name == b"PEXPIRE" { self.now() } else { 0 };
                let at = from.checked_add(time).ok_or(INVALID_TIME)?;
                let only_later = match args.get(2) {
                    None => false,
                    Some(word) if word.eq_ignore_ascii_case(b"GT") => true,
                    Some(_) => return Err("ERR Unsupported option"),
                };
                let before = self.get(key).map(|key| key.expires);
                let later = |before: Option<i64>| before.is_some_and(|before| at > before);
                match before {
                    Some(before) if !only_later || later(before) => {
                        Value::Int(self.expire_at(key, at))
                    }
                    _ => Value::Int(0),
                }
            }
            b"SET" => return self.set_text(key, &args[1], &args[2..]),
            b"HGET" => {
                let fields = self.hash(key)?;
                fields
                    .and_then(|it| it.get(&args[1]))
                    .map_or(Value::Nil, |it| bulk(it))
            }
            b"HMGET" => {
                let fields = self.hash(key)?;
                let value = |field| {
                    fields
                        .and_then(|it| it.get(field))
                        .map_or(Value::Nil, |it: &Bytes| bulk(it))
                };
                Value::Array(args[1..].iter().map(value).collect())
            }
            b"HSET" => {
                if args.len() % 2 == 0 {
                    return Err("ERR wrong number of arguments for 'hset' command");
                }
                self.hash(key)?;
                let mut added = 0;
                if let Data::Hash(fields) = self.entry(key, Data::Hash(BTreeMap::new())) {
                    for pair in args[1..].chunks(2) {
                        added +=
                            usize::from(fields.insert(pair[0].clone(), pair[1].clone()).is_none());
                    }
                }
                count(added)
            }
            b"HDEL" => {
                self.hash(key)?;
                let mut removed = 0;
                if let Some(Key {
                    data: Data::Hash(fields),
                    ..
                }) = self.get_mut(key)
                {
                    removed = args[1..]
                        .iter()
                        .filter(|field| fields.remove(*field).is_some())
                        .count();
                }
                self.tidy(key);
                count(removed)
            }
            b"ZADD" => {
                if args.len() % 2 == 0 {
                    return Err(SYNTAX);
                }
                let pairs: Option<Vec<(f64, &Bytes)>> = args[1..]
                    .chunks(2)
                    .map(|pair| Some((score(&pair[0])?, &pair[1])))
                    .collect();
                let pairs = pairs.ok_or("ERR value is not a valid float")?;
                self.set(key)?;
                let mut added = 0;
                if let Data::Set(members) = self.entry(key, Data::Set(BTreeMap::new())) {
                    for (score, member) in pairs {
                        added += usize::from(members.insert(member.clone(), score).is_none());
                    }
                }
                count(added)
            }
            b"ZREM" => {
                self.set(key)?;
                let mut removed = 0;
                if let Some(Key {
                    data: Data::Set(members),
                    ..
                }) = self.get_mut(key)
                {
                    removed = args[1..]
                        .iter()
                        .filter(|member| members.remove(*member).is_some())
                        .count();
                }
                self.tidy(key);
                count(removed)
            }
            b"ZSCORE" => {
                let score = self.set(key)?.and_then(|members| members.get(&args[1]));
                score.map_or(Value::Nil, |score| Value::BulkString(written(*score)))
            }
            b"ZRANGE" => {
                let (from, to) = (
                    integer(&args[1]).ok_or(NO_INTEGER)?,
                    integer(&args[2]).ok_or(NO_INTEGER)?,
                );
                let with_scores = match args.get(3) {
                    None => false,
                    Some(word) if word.eq_ignore_ascii_case(b"WITHSCORES") && args.len() == 4 => {
                        true
                    }
                    Some(_) => return Err(SYNTAX),
                };
                let members = self.set(key)?.map(ranked).unwrap_or_default();
                let length = members.len() as i64;
                let place = |index: i64| if index < 0 { index + length } else { index };
                let (from, to) = (place(from).max(0), place(to));
                let chosen = (0..)
                    .zip(members)
                    .filter(|(index, _)| (from..=to).contains(index));
                listed(chosen.map(|(_, member)| member), with_scores)
            }
            b"ZRANGEBYSCORE" | b"ZCOUNT" | b"ZREMRANGEBYSCORE" => {
                let bounds = (bound(&args[1]), bound(&args[2]));
                let (Some((least, above)), Some((most, below))) = bounds else {
                    return Err("ERR min or max is not a float");
                };
                let is_in = |score: f64| {
                    (if above { score > least } else { score >= least })
                        && (if below { score < most } else { score <= most })
                };
                let (mut with_scores, mut skip, mut take) = (false, 0, usize::MAX);
                let mut options = args[3..].iter();
                while let Some(option) = options.next() {
                    if option.eq_ignore_ascii_case(b"WITHSCORES") {
                        with_scores = true;
                    } else if option.eq_ignore_ascii_case(b"LIMIT") && options.len() >= 2 {
                        let mut next =
                            || options.next().and_then(|it| integer(it)).ok_or(NO_INTEGER);
                        let (from, most) = (next()?, next()?);
                        // Nothing is left after a negative number.
                        (skip, take) = (
                            from.try_into().unwrap_or(usize::MAX),
                            most.try_into().unwrap_or(usize::MAX),
                        );
                    } else {
                        return Err(SYNTAX);
                    }
                }
                let members = self.set(key)?.map(ranked).unwrap_or_default();
                let chosen = members.into_iter().filter(|(_, score)| is_in(*score));
                match &name[..] {
                    b"ZCOUNT" => count(chosen.count()),
                    b"ZRANGEBYSCORE" => listed(chosen.skip(skip).take(take), with_scores),
                    _ => {
                        let gone: Vec<Bytes> = chosen.map(|(member, _)| member.clone()).collect();
                        if let Some(Key {
                            data: Data::Set(members),
                            ..
                        }) = self.get_mut(key)
                        {
                            members.retain(|member, _| !gone.contains(member));
                        }
                        self.tidy(key);
                        count(gone.len())
                    }
                }
            }
            // PUBLISH and SPUBLISH.
            _ => {
                self.published.push((key.to_vec(), args[1].clone()));
                count(
                    self.channels
                        .iter()
                        .filter(|it| it.as_bytes() == key)
                        .count(),
                )
            }
        })
    }

    fn set_text(&mut self, key: &[u8], text: &[u8], options: &[Bytes]) -> Reply {
        let (mut only_new, mut expires) = (false, None);
        let mut options = options.iter();
        while let Some(option) = options.next() {
            let unit = match &option.to_ascii_uppercase()[..] {
                b"NX" => {
                    only_new = true;
                    continue;
                }
                b"PX" => 1,
                b"EX" => 1000,
                _ => return Err(SYNTAX),
            };
            let time = integer(options.next().ok_or(SYNTAX)?).ok_or(NO_INTEGER)?;
            let time = Some(time).filter(|time| *time > 0);
            let time = time.and_then(|time| time.checked_mul(unit));
            let at = time.and_then(|time| time.checked_add(self.now()));
            expires = Some(at.ok_or(INVALID_TIME)?);
        }
        if only_new && self.get(key).is_some() {
            return Ok(Value::Nil);
        }
        let data = Data::Text(text.to_vec());
        self.keys.insert(key.to_vec(), Key { data, expires });
        Ok(Value::Okay)
    }
}

/// An error reply.
pub(crate) fn error(text: &str) -> Value {
    let line = format!("-{}\r\n", text.replace(['\r', '\n'], " "));
    redis::parse_redis_value(line.as_bytes()).unwrap_or(Value::Nil)
}

fn bulk(bytes: &[u8]) -> Value {
    Value::BulkString(bytes.to_vec())
}

fn count(number: usize) -> Value {
    Value::Int(number as i64)
}

/// An integer in its only form: without a `+`, leading zeros, or the sign of zero.
fn integer(text: &[u8]) -> Option<i64> {
    let text = str::from_utf8(text).ok()?;
    text.parse().ok().filter(|it: &i64| it.to_string() == text)
}

fn score(text: &[u8]) -> Option<f64> {
    let score: f64 = str::from_utf8(text).ok()?.parse().ok()?;
    // A small set keeps no sign of zero.
    Some(score + 0.0).filter(|score| !score.is_nan())
}

fn written(score: f64) -> Bytes {
    score.to_string().into_bytes()
}

/// A bound of scores, and whether it is excluded.
fn bound(text: &[u8]) -> Option<(f64, bool)> {
    match text.strip_prefix(b"(") {
        Some(text) => Some((score(text)?, true)),
        None => Some((score(text)?, false)),
    }
}

fn listed<'a>(members: impl Iterator<Item = (&'a Bytes, f64)>, with_scores: bool) -> Value {
    let mut list = Vec::new();
    for (member, score) in members {
        list.push(bulk(member));
        if with_scores {
            list.push(Value::BulkString(written(score)));
        }
    }
    Value::Array(list)
}

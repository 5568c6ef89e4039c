//! The rights that the user of a connection lacks, found without a right of their own: a script
//! asks the server which commands it would deny.

use redis::{Cmd, ServerError, Value};

use super::{
    super::script::{self, Call},
    acl::AclLine,
};
use crate::guard::fence::FencingToken;

/// The arguments of each command whose right is checked; `@` stands for a key or a channel. They
/// must be valid: Redis 7.0 ends if it looks for keys beyond the last argument.
const COMMANDS: &[(&str, &str)] = &[
    (
        "evalsha",
        "evalsha 0000000000000000000000000000000000000000 0",
    ),
    ("info", "info"),
    ("subscribe", "subscribe @"),
    ("publish", "publish @ 0"),
    ("time", "time"),
    ("type", "type @"),
    ("exists", "exists @"),
    ("get", "get @"),
    ("mget", "mget @"),
    ("set", "set @ 0"),
    ("del", "del @"),
    ("pttl", "pttl @"),
    ("pexpire", "pexpire @ 1"),
    ("pexpireat", "pexpireat @ 1"),
    ("hget", "hget @ 0"),
    ("hmget", "hmget @ 0"),
    ("hset", "hset @ 0 0"),
    ("hdel", "hdel @ 0"),
    ("zadd", "zadd @ 0 0"),
    ("zrem", "zrem @ 0"),
    ("zscore", "zscore @ 0"),
    ("zcount", "zcount @ 0 0"),
    ("zrange", "zrange @ 0 0"),
    ("zrangebyscore", "zrangebyscore @ 0 0"),
    ("zremrangebyscore", "zremrangebyscore @ 0 0"),
    ("select", "select 0"),
    ("wait", "wait 0 1"),
    ("cluster|slots", "cluster slots"),
    ("asking", "asking"),
    ("ssubscribe", "ssubscribe @"),
    ("sunsubscribe", "sunsubscribe @"),
    ("spublish", "spublish @ 0"),
];

/// The rights of an ACL line that are checked.
#[derive(Debug, PartialEq, Eq)]
struct Rights<'a> {
    /// The patterns of keys, each with a key that it matches.
    keys: Vec<(&'a str, String)>,
    channels: Option<&'a str>,
    /// The commands, each with its arguments.
    commands: Vec<(&'a str, &'static str)>,
}

impl<'a> Rights<'a> {
    fn of(acl: &'a AclLine, namespace: &str) -> Self {
        let samples = [
            format!("{namespace}:health"),
            format!("{{{namespace}:health}}:f"),
            format!("f:{namespace}:health"),
            format!("{{{namespace}:health}}:q"),
            format!("q:{namespace}:health"),
        ];
        let words = || acl.rights();
        let keys = words().filter(|word| word.starts_with('~')).zip(samples);
        let arguments = |word: &'a str| {
            let command = word.strip_prefix('+')?;
            let (_, arguments) = COMMANDS.iter().find(|(name, _)| *name == command)?;
            Some((word, *arguments))
        };
        Self {
            keys: keys.collect(),
            channels: words().find(|word| word.starts_with('&')),
            commands: words().filter_map(arguments).collect(),
        }
    }

    /// The rights that are missing, by the reply to the question.
    fn missing(&self, denied: &[bool]) -> Vec<String> {
        let count = self.keys.len();
        let rows: Vec<_> = self
            .commands
            .iter()
            .zip(denied.chunks_exact(count))
            .collect();
        let all = |row: &[bool]| row.iter().all(|denied| *denied);
        let mut missing = Vec::new();
        // The first key is also a channel of the namespace.
        let (channels, others): (Vec<_>, Vec<_>) = rows
            .into_iter()
            .partition(|((word, _), _)| is_of_channels(word));
        if let Some(pattern) = self.channels
            && !channels.is_empty()
            && channels.iter().all(|(_, row)| row[0])
        {
            missing.push(pattern);
        }
        let of_channels = channels.iter().filter(|(_, row)| row[0]);
        missing.extend(of_channels.map(|((word, _), _)| *word));
        let (keyed, plain): (Vec<_>, Vec<_>) = others
            .into_iter()
            .partition(|((_, arguments), _)| arguments.contains('@'));
        missing.extend(
            plain
                .iter()
                .filter(|(_, row)| all(row))
                .map(|((word, _), _)| *word),
        );
        if !keyed.is_empty() && keyed.iter().all(|(_, row)| all(row)) {
            // Without a pattern every command is denied. Which of them are allowed is seen once the
            // patterns are.
            missing.extend(self.keys.iter().map(|(pattern, _)| *pattern));
            return missing.into_iter().map(str::to_owned).collect();
        }
        for (index, (pattern, _)) in self.keys.iter().enumerate() {
            let allowed = |row: &[bool]| !all(row);
            if keyed.iter().any(|(_, row)| allowed(row) && row[index]) {
                missing.push(pattern);
            }
        }
        missing.extend(
            keyed
                .iter()
                .filter(|(_, row)| all(row))
                .map(|((word, _), _)| *word),
        );
        missing.into_iter().map(str::to_owned).collect()
    }
}

/// Whether locks work without the right, if only with a delay or with fewer checks.
pub(super) fn is_dispensable(right: &str) -> bool {
    right.starts_with('&') || right == "+info" || is_of_channels(right)
}

fn is_of_channels(right: &str) -> bool {
    right.ends_with("subscribe") || right.ends_with("publish")
}

/// The question which rights of the line the user lacks.
pub(crate) fn question(acl: &AclLine, namespace: &str) -> Cmd {
    let rights = Rights::of(acl, namespace);
    let call = Call::new(&script::RIGHTS, 0).number(rights.keys.len() as u64);
    let keys = rights.keys.iter();
    let call = keys.fold(call, |call, (_, key)| call.arg(key));
    let commands = rights.commands.iter();
    let call = commands.fold(call, |call, (_, arguments)| call.arg(arguments));
    call.by_text(FencingToken::KEPT_FOR)
}

/// The missing rights, by the reply to the [`question`]. `None` if the server did not answer it.
pub(crate) fn missing(reply: &Value, acl: &AclLine, namespace: &str) -> Option<Vec<String>> {
    match reply {
        Value::ServerError(error) if is_denied(error) => Some(vec!["+eval".into()]),
        Value::Array(denied) => {
            let denied: Vec<_> = denied.iter().map(|it| *it == Value::Int(1)).collect();
            Some(Rights::of(acl, namespace).missing(&denied))
        }
        _ => None,
    }
}

pub(super) fn is_denied(error: &ServerError) -> bool {
    error.code() == "NOPERM"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_right_of_the_line_is_checked() {
        let line = AclLine::of_cluster("a b*");
        for line in [line, AclLine::new("x", 3).waiting(true)] {
            let rights = Rights::of(&line, "x");
            let commands = line.rights().filter(|word| word.starts_with('+'));
            let checked: Vec<_> = rights.commands.iter().map(|(word, _)| *word).collect();
            for command in commands {
                // The check itself needs it.
                assert!(
                    command == "+eval" || checked.contains(&command),
                    "{command}"
                );
            }
            let patterns = line.rights().filter(|word| word.starts_with('~')).count();
            assert_eq!(rights.keys.len(), patterns, "each pattern has a key");
        }
    }

    #[test]
    fn missing_rights_have_different_errors() {
        let line = AclLine::new("x", 0);
        let rights = Rights::of(&line, "x");
        let missing = |denies: &dyn Fn(&str, usize) -> bool| {
            let commands = rights.commands.iter();
            let denied: Vec<_> = commands
                .flat_map(|(word, _)| (0..5).map(move |key| (*word, key)))
                .map(|(word, key)| denies(word, key))
                .collect();
            rights.missing(&denied)
        };
        assert!(missing(&|word, key| is_of_channels(word) && key > 0).is_empty());
        assert_eq!(missing(&|word, _| word == "+hset"), ["+hset"]);
        let keyed =
            |word: &str| !is_of_channels(word) && !["+evalsha", "+info", "+time"].contains(&word);
        assert_eq!(missing(&|word, key| keyed(word) && key == 2), ["~f:x:*"]);
        assert_eq!(missing(&|word, _| keyed(word)).len(), 5, "all patterns");
        assert_eq!(
            missing(&|word, _| is_of_channels(word)),
            ["&x:*", "+subscribe", "+publish"]
        );
        assert_eq!(missing(&|word, _| word == "+publish"), ["+publish"]);
    }
}

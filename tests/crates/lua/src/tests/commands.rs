//! Random commands, one in each script, with all types, arguments that are wrong, expiry, and a
//! server that is out of memory.

use super::{Dice, START, Twins};

/// Returns what Lua makes of the reply to a command, and the reply.
const COMMAND: &str = "
local reply = redis.pcall(unpack(ARGV))
local kind = type(reply)
if kind == 'table' and reply.err then
  return {'err ' .. string.match(reply.err, '^%u+')}
elseif kind == 'table' then
  kind = reply.ok and 'ok ' .. reply.ok or '#' .. #reply
end
return {kind, reply}";
/// The same for a command whose error ends the script.
const CALL: &str = "return {redis.call(unpack(ARGV))}";
/// The writes of a script after its first one are not refused for lack of memory.
const TWICE: &str = "
local first = redis.pcall(unpack(ARGV))
local second = redis.pcall('SET', 'last', 'word')
return {type(first) == 'table' and first.err and 1 or 0, second.err and 1 or 0}";
/// What becomes of the values of Lua.
const VALUES: [&str; 16] = [
    "return 3.7",
    "return -3.7",
    "return {1, 2.5, 'x', nil, 4}",
    "return {1, false, true, {}, {'a', {'b'}}}",
    "return {ok = 'fine'}",
    "return redis.error_reply('MINE it is')",
    "return redis.status_reply('fine')",
    "return nil",
    "return redis.sha1hex('abc')",
    "redis.call('SET', 'n', 12345678901234) return redis.call('GET', 'n')",
    "redis.call('SET', 'n', 1e17) return redis.call('GET', 'n')",
    "redis.call('SET', 'n', 0.1) return redis.call('GET', 'n')",
    "return redis.call('HGET', 'none', 'field')",
    "redis.call('SET', 't', 'text') return redis.call('HGET', 't', 'x') or 1",
    "return redis.call('TIME')",
    "return {#KEYS, #ARGV, tostring(1795000000000000)}",
];
const ROUNDS: usize = 10_000;
const KEYS: [&str; 4] = ["a", "b", "c", "d"];

fn command(dice: &mut Dice, now: u64) -> Vec<String> {
    let key = dice.one(&KEYS).to_owned();
    let word = |dice: &mut Dice| dice.one(&["x", "y", "z", "12", "0", "-1"]).to_owned();
    let numbers = [
        "0", "1", "2", "-1", "-2", "5", "1.5", "n", "+1", "01", "-0", "", "nan",
    ];
    let number = |dice: &mut Dice| dice.one(&numbers).to_owned();
    let bounds = ["-inf", "+inf", "(1", "1", "2", "(5", "n", "nan", "(-inf"];
    let bound = |dice: &mut Dice| dice.one(&bounds).to_owned();
    let times = [
        "60000",
        "900",
        "2",
        "1",
        "0",
        "-5",
        "n",
        "9223372036854775807",
        "9223372036854775",
    ];
    let millis = |dice: &mut Dice| dice.one(&times).to_owned();
    let names = [
        "GET",
        "MGET",
        "SET",
        "SET",
        "SET",
        "DEL",
        "EXISTS",
        "TYPE",
        "PTTL",
        "PEXPIRE",
        "PEXPIRE",
        "PEXPIREAT",
        "HGET",
        "HMGET",
        "HSET",
        "HSET",
        "HDEL",
        "ZADD",
        "ZADD",
        "ZREM",
        "ZSCORE",
        "ZRANGE",
        "ZRANGEBYSCORE",
        "ZCOUNT",
        "ZREMRANGEBYSCORE",
        "PUBLISH",
        "NONE",
        "get",
    ];
    let name = dice.one(&names);
    let mut args = match name {
        "SET" => vec![key, word(dice)],
        "MGET" | "DEL" | "EXISTS" => vec![key, dice.one(&KEYS).to_owned()],
        "PEXPIRE" => vec![key, millis(dice)],
        "PEXPIREAT" => {
            let at = now / 1000 + [0, 0, 1, 60_000][dice.below(4)] - dice.below(2) as u64;
            vec![key, at.to_string()]
        }
        "HGET" | "HDEL" | "ZREM" | "ZSCORE" => vec![key, word(dice)],
        "HMGET" | "HSET" => vec![key, word(dice), word(dice)],
        "ZADD" => vec![key, number(dice), word(dice)],
        "ZRANGE" => vec![key, number(dice), number(dice)],
        "ZRANGEBYSCORE" | "ZCOUNT" | "ZREMRANGEBYSCORE" => vec![key, bound(dice), bound(dice)],
        "PUBLISH" => vec![key, word(dice)],
        _ => vec![key],
    };
    let mut option = |words: &[String]| args.extend_from_slice(words);
    match (name, dice.below(4)) {
        ("SET", 0) => option(&["PX".to_owned(), millis(dice)]),
        ("SET", 1) => option(&["EX".to_owned(), millis(dice), "NX".to_owned()]),
        ("SET", 2) => option(&[dice.one(&["nx", "PX", "WORD"]).to_owned()]),
        ("PEXPIRE" | "PEXPIREAT", 0) => option(&[dice.one(&["GT", "gt", "WORD"]).to_owned()]),
        ("ZRANGE" | "ZRANGEBYSCORE", 0 | 1) => option(&["WITHSCORES".to_owned()]),
        ("ZRANGEBYSCORE", 2) => option(&["LIMIT".to_owned(), number(dice), number(dice)]),
        ("HMGET" | "HDEL" | "ZREM", 2) => option(&[word(dice)]),
        ("HSET", 2) => option(&[word(dice), word(dice)]),
        ("ZADD", 2) => option(&[number(dice), word(dice)]),
        (_, 3) if dice.below(10) == 0 => drop(args.pop()),
        (_, 3) if dice.below(20) == 0 => option(&[word(dice)]),
        _ => {}
    }
    args.insert(0, name.to_owned());
    args
}

#[tokio::test]
async fn commands_do_what_they_do_on_a_server() {
    let mut twins = Twins::start().await;
    for text in VALUES {
        twins.eval(text, &[], &[]);
    }
    let (mut dice, mut now, mut refused) = (Dice(1), START, 0);
    for _ in 0..ROUNDS {
        now = dice.later(now);
        twins.set_time(now);
        match dice.below(100) {
            0 => twins.set_full(true),
            1..=5 => twins.set_full(false),
            _ => {}
        }
        let command = command(&mut dice, now);
        let words: Vec<_> = command.into_iter().map(String::into_bytes).collect();
        let text = [COMMAND, COMMAND, COMMAND, CALL, TWICE][dice.below(5)];
        let reply = twins.eval(text, &[], &words);
        refused += usize::from(format!("{reply:?}").contains("OOM"));
    }
    assert!(refused > 0, "the server was never out of memory");
}

//! The slot map of a cluster. This module does no I/O, and its callers pass the
//! replies of the nodes.
//!
//! <https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/>

use std::{
    collections::HashSet,
    fmt,
    ops::RangeInclusive,
    sync::{Arc, LazyLock},
};

use crc16::{State, XMODEM};
use redis::Value;

use crate::store::redis::script::reply::text;

/// The number of slots of a cluster.
pub(super) const SLOTS: u16 = 16_384;

/// The most nodes of a cluster, replicas included: the specification recommends 1000 at most.
const MOST_NODES: usize = 4096;
/// The longest name of a host, in bytes.
const LONGEST_HOST: usize = 255;

/// A slot.
pub(crate) type Slot = u16;

/// The slot of a key: that of the text within its first `{..}` if that is not empty, otherwise
/// that of the whole key.
pub(crate) fn slot_of(key: &[u8]) -> Slot {
    State::<XMODEM>::calculate(hash_tag(key)) % SLOTS
}

/// A number whose digits hash to the slot. The numbers of all slots are found by a single search.
pub(crate) fn number_in(slot: Slot) -> u32 {
    static NUMBERS: LazyLock<Vec<u32>> = LazyLock::new(|| {
        let mut numbers = vec![0; usize::from(SLOTS)];
        // These cover every slot, and the smallest number of each is kept.
        for number in (0..110_000_u32).rev() {
            numbers[usize::from(slot_of(number.to_string().as_bytes()))] = number;
        }
        numbers
    });
    NUMBERS[usize::from(slot % SLOTS)]
}

fn hash_tag(key: &[u8]) -> &[u8] {
    let tag = || {
        let begin = key.iter().position(|byte| *byte == b'{')? + 1;
        let length = key[begin..].iter().position(|byte| *byte == b'}')?;
        (length > 0).then(|| &key[begin..begin + length])
    };
    tag().unwrap_or(key)
}

/// The address of a node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Address {
    pub(super) host: Arc<str>,
    pub(super) port: u16,
}

impl Address {
    pub(super) fn new(host: &str, port: u16) -> Self {
        let host = host.into();
        Self { host, port }
    }

    /// Parses `host:port` in a redirection.
    fn parse(text: &str, asked: &Self) -> Option<Self> {
        // An IPv6 address comes without brackets.
        let (host, port) = text.rsplit_once(':')?;
        let port = port.parse().ok()?;
        (host != "?" && is_host(host)).then(|| Self::named(host, port, asked))
    }

    /// An address in a reply. An empty host is the host of the node `asked`: the nodes of the
    /// cluster then do not know the name by which clients reach them.
    fn named(host: &str, port: u16, asked: &Self) -> Self {
        Self::new(if host.is_empty() { &asked.host } else { host }, port)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') {
            write!(f, "[{host}]:{port}")
        } else {
            write!(f, "{host}:{port}")
        }
    }
}

/// The reply of a node that does not execute a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Redirection {
    /// Another node serves the slot.
    Moved(Slot, Address),
    /// The slot is migrating to another node. The keys are there already, or do not exist.
    Ask(Address),
    /// Some of the keys have moved to the other node, some have not.
    TryAgain,
    /// The script has deleted a key and accessed it again, which a node refuses while the slot
    /// migrates. The script was not executed to its end.
    HalfWay,
    /// The node does not serve the slot at present, and its owner is to be looked up, as the reply
    /// does not name it.
    Down,
}

impl Redirection {
    /// Parses a reply of the node `asked`; `None` if it is not a redirection.
    pub(super) fn parse(reply: &Value, asked: &Address) -> Option<Self> {
        let Value::ServerError(error) = reply else {
            return None;
        };
        let details = error.details().unwrap_or_default();
        let place = || {
            let (slot, address) = details.split_once(' ')?;
            let slot = slot.parse().ok().filter(|slot| *slot < SLOTS)?;
            // Valkey may add words after the address.
            Some((slot, Address::parse(address.split(' ').next()?, asked)))
        };
        match error.code() {
            "MOVED" => place().map(|(slot, address)| match address {
                Some(address) => Self::Moved(slot, address),
                None => Self::Down,
            }),
            "ASK" => place().and_then(|(_, address)| address).map(Self::Ask),
            "TRYAGAIN" => Some(Self::TryAgain),
            "ERR" if details.contains("non local key") => Some(Self::HalfWay),
            // Also sent by a replica that is connected to as a node, and by a primary that has
            // become a replica while a script ran.
            "CLUSTERDOWN" | "READONLY" | "MASTERDOWN" => Some(Self::Down),
            _ => None,
        }
    }
}

/// The slot map.
pub(super) struct Slots {
    /// For each slot the index of its owner in `members`, or `NO_OWNER`.
    owners: Vec<u16>,
    /// All known nodes of the cluster, replicas included.
    pub(super) members: Vec<Address>,
}

const NO_OWNER: u16 = u16::MAX;

impl Slots {
    pub(super) fn empty() -> Self {
        let (owners, members) = (vec![NO_OWNER; usize::from(SLOTS)], Vec::new());
        Self { owners, members }
    }

    /// Parses the reply of the node `asked` to `CLUSTER SLOTS`, which has for each range of slots
    /// its primary and then its replicas. `None` if it is another reply, names no node, or names
    /// more than any cluster has.
    pub(super) fn parse(reply: &Value, asked: &Address) -> Option<Self> {
        let Value::Array(ranges) = reply else {
            return None;
        };
        let (mut slots, mut left) = (Self::empty(), usize::from(SLOTS));
        for range in ranges {
            let Value::Array(parts) = range else {
                return None;
            };
            let [Value::Int(first), Value::Int(last), nodes @ ..] = parts.as_slice() else {
                return None;
            };
            let range = u16::try_from(*first).ok()?..=u16::try_from(*last).ok()?;
            // Each slot is in one range.
            left = left.checked_sub(range.len().max(1))?;
            let mut nodes = nodes.iter().map(|node| address_of(node, asked));
            if let Some(owner) = nodes.next()? {
                slots.assign(range, owner);
            }
            for replica in nodes.flatten() {
                slots.member(replica);
                if slots.members.len() > MOST_NODES {
                    return None;
                }
            }
        }
        (!slots.members.is_empty()).then_some(slots)
    }

    fn member(&mut self, address: Address) -> u16 {
        let known = self.members.iter().position(|member| *member == address);
        let index = known.unwrap_or_else(|| {
            self.members.push(address);
            self.members.len() - 1
        });
        // A cluster has a thousand nodes at most.
        u16::try_from(index).unwrap_or(NO_OWNER)
    }

    /// Records that a node serves the slots.
    pub(super) fn assign(&mut self, range: RangeInclusive<Slot>, owner: Address) {
        let owner = self.member(owner);
        for slot in range {
            if let Some(place) = self.owners.get_mut(usize::from(slot)) {
                *place = owner;
            }
        }
    }

    /// The node that serves the slot.
    pub(super) fn owner(&self, slot: Slot) -> Option<&Address> {
        let index = self.owners[usize::from(slot)];
        self.members.get(usize::from(index))
    }

    /// The index of the owner among the members: a number that the keys of one node share.
    pub(super) fn owner_number(&self, slot: Slot) -> u64 {
        self.owners[usize::from(slot)].into()
    }

    /// All nodes that serve a slot.
    pub(super) fn owners(&self) -> HashSet<&Address> {
        let mut owners = self.owners.clone();
        owners.dedup();
        let owner = |index| self.members.get(usize::from(index));
        owners.into_iter().filter_map(owner).collect()
    }

    /// Whether every slot has the same owner in both maps.
    pub(super) fn agrees_with(&self, other: &Self) -> bool {
        (0..SLOTS).all(|slot| self.owner(slot) == other.owner(slot))
    }
}

/// Returns whether the text may be the name of a host, or nothing. A reply may have any text, which
/// log lines would show.
pub(crate) fn is_host(text: &str) -> bool {
    text.len() <= LONGEST_HOST && !text.contains(|c: char| c.is_control() || c.is_whitespace())
}

/// Parses a node in a reply to `CLUSTER SLOTS`: host, port, and from Redis 7 on its id and other
/// names. `None` if it has no address.
fn address_of(node: &Value, asked: &Address) -> Option<Address> {
    let Value::Array(parts) = node else {
        return None;
    };
    let [host, Value::Int(port), rest @ ..] = parts.as_slice() else {
        return None;
    };
    let port = u16::try_from(*port).ok()?;
    match text(host).unwrap_or_default() {
        host if !is_host(host) => None,
        // The node is to be announced by its name, and has none.
        "?" => {
            let mut names = rest.get(1)?.as_map_iter()?;
            let (_, ip) = names.find(|(name, _)| text(name) == Some("ip"))?;
            Some(Address::new(text(ip).filter(|ip| is_host(ip))?, port))
        }
        host => Some(Address::named(host, port, asked)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bulk(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    fn node(host: Value, port: i64) -> Value {
        node_with(host, port, Value::Array(vec![]))
    }

    fn node_with(host: Value, port: i64, names: Value) -> Value {
        Value::Array(vec![host, Value::Int(port), bulk("id"), names])
    }

    fn range(first: i64, last: i64, nodes: impl IntoIterator<Item = Value>) -> Value {
        let bounds = [first, last].map(Value::Int);
        Value::Array(bounds.into_iter().chain(nodes).collect())
    }

    fn parse(ranges: impl Into<Vec<Value>>) -> Option<Slots> {
        Slots::parse(&Value::Array(ranges.into()), &asked())
    }

    fn error(text: &str) -> Value {
        redis::parse_redis_value(format!("-{text}\r\n").as_bytes()).unwrap()
    }

    fn asked() -> Address {
        Address::new("asked", 1)
    }

    #[test]
    fn keys_lie_in_the_slots_of_the_specification() {
        for (key, slot) in [
            ("123456789", 0x31c3),
            ("foo", 12182),
            ("{foo}bar", 12182),
            ("a{foo}{bar}", 12182),
        ] {
            assert_eq!(slot_of(key.as_bytes()), slot, "{key}");
        }
        for whole in ["foo{}{bar}", "{}", "a{b", "a}b"] {
            let checksum = State::<XMODEM>::calculate(whole.as_bytes());
            assert_eq!(slot_of(whole.as_bytes()), checksum % SLOTS, "{whole}");
        }
        assert_eq!(slot_of(b"foo{{bar}}zap"), slot_of(b"{bar"));
    }

    #[test]
    fn each_slot_has_a_number() {
        for slot in 0..SLOTS {
            let channel = format!("ns:random:{{{}}}", number_in(slot));
            assert_eq!(slot_of(channel.as_bytes()), slot);
        }
    }

    #[test]
    fn a_map_knows_the_owner_of_each_slot() {
        let slots = parse([
            range(0, 99, [node(bulk("a"), 1), node(bulk("b"), 2)]),
            range(100, 16383, [node(bulk("::1"), 3)]),
        ])
        .unwrap();
        let (a, other) = (Address::new("a", 1), Address::new("::1", 3));
        assert_eq!(other.to_string(), "[::1]:3");
        for (slot, owner) in [(0, &a), (99, &a), (100, &other), (16383, &other)] {
            assert_eq!(slots.owner(slot), Some(owner));
        }
        assert_eq!(slots.members.len(), 3, "with the replica");
        assert_eq!(slots.owners(), [&a, &other].into());
        assert_ne!(slots.owner_number(0), slots.owner_number(100));
    }

    #[test]
    fn a_slot_without_an_owner_has_none() {
        let slots = parse([range(5, 9, [node(bulk("a"), 1)])]).unwrap();
        assert_eq!((slots.owner(4), slots.owner(10)), (None, None));
        assert_eq!(slots.owner(5), Some(&Address::new("a", 1)));
    }

    #[test]
    fn a_node_without_a_name_is_where_the_one_that_was_asked_is() {
        for host in [bulk(""), Value::Nil] {
            let slots = parse([range(0, 9, [node(host, 7)])]).unwrap();
            assert_eq!(slots.owner(0), Some(&Address::new("asked", 7)));
        }
    }

    #[test]
    fn a_node_that_only_lacks_its_name_is_reached_by_its_address() {
        let names = ["hostname", "", "ip", "10.0.0.1"].map(bulk);
        for names in [
            Value::Array(names.into()),
            Value::Map(vec![(bulk("ip"), bulk("10.0.0.1"))]),
        ] {
            let slots = parse([range(0, 9, [node_with(bulk("?"), 7, names)])]).unwrap();
            assert_eq!(slots.owner(0), Some(&Address::new("10.0.0.1", 7)));
        }
        assert!(parse([range(0, 9, [node(bulk("?"), 7)])]).is_none());
    }

    #[test]
    fn a_reply_that_is_no_map_is_refused() {
        assert!(Slots::parse(&Value::Nil, &asked()).is_none());
        for ranges in [
            vec![],
            vec![Value::Int(1)],
            vec![range(0, 1, [])],
            vec![range(-1, 1, [node(bulk("a"), 1)])],
            vec![range(0, 1, [node(bulk("a"), 65_536)])],
        ] {
            assert!(parse(ranges.clone()).is_none(), "{ranges:?}");
        }
    }

    #[test]
    fn a_reply_longer_than_that_of_any_cluster_is_refused() {
        let whole = |node| range(0, 16383, [node]);
        assert!(parse([whole(node(bulk("a"), 1))]).is_some());
        assert!(parse([1, 2].map(|port| whole(node(bulk("a"), port)))).is_none());
        let none = vec![range(1, 0, [node(bulk("a"), 1)]); 20_000];
        assert!(parse(none).is_none());
        let crowd = (0..200_000).map(|number| node(bulk(&number.to_string()), 1));
        assert!(parse([range(0, 1, crowd)]).is_none());
    }

    #[test]
    fn a_text_that_no_host_has_is_no_address() {
        for host in ["a\u{1b}[2J", "a b", "a\n", &"x".repeat(256)] {
            assert!(parse([range(0, 9, [node(bulk(host), 7)])]).is_none());
            let names = Value::Map(vec![(bulk("ip"), bulk(host))]);
            assert!(parse([range(0, 9, [node_with(bulk("?"), 7, names)])]).is_none());
        }
        let moved = error("MOVED 7 a\u{1b}[2J:2");
        assert_eq!(
            Redirection::parse(&moved, &asked()),
            Some(Redirection::Down)
        );
    }

    #[test]
    fn moved_slot_changes_its_owner_alone() {
        let mut slots = parse([range(0, 99, [node(bulk("a"), 1)])]).unwrap();
        slots.assign(50..=50, Address::new("b", 2));
        for (slot, owner) in [(49, ("a", 1)), (50, ("b", 2)), (51, ("a", 1))] {
            assert_eq!(slots.owner(slot), Some(&Address::new(owner.0, owner.1)));
        }
    }

    #[test]
    fn redirections_are_understood() {
        use Redirection::*;
        let b = || Address::new("b", 2);
        let try_again = "TRYAGAIN Multiple keys request during rehashing of slot";
        let half_way =
            "ERR Script attempted to access a non local key in a cluster node script: f_1";
        for (text, expected) in [
            ("MOVED 7 b:2", Some(Moved(7, b()))),
            ("MOVED 7 b:2 extra", Some(Moved(7, b()))),
            ("MOVED 7 :2", Some(Moved(7, Address::new("asked", 2)))),
            ("MOVED 7 ?:2", Some(Down)),
            ("MOVED 7 ::1:2", Some(Moved(7, Address::new("::1", 2)))),
            ("MOVED 16384 b:2", None),
            ("MOVED", None),
            ("ASK 7 b:2", Some(Ask(b()))),
            ("ASK 7 ?:2", None),
            (try_again, Some(TryAgain)),
            (half_way, Some(HalfWay)),
            ("CLUSTERDOWN The cluster is down", Some(Down)),
            ("NOSCRIPT No matching script.", None),
        ] {
            let found = Redirection::parse(&error(text), &asked());
            assert_eq!(found, expected, "{text}");
        }
    }

    proptest! {
        #[test]
        fn a_key_lies_where_its_hash_tag_does(tag in "[^{}]{1,20}", before in "[^{}]{0,9}", behind in ".{0,9}") {
            prop_assert_eq!(slot_of(format!("{before}{{{tag}}}{behind}").as_bytes()), slot_of(tag.as_bytes()));
        }
    }
}

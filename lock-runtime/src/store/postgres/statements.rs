//! The statements of the calls, their arguments, and their replies.

use std::{error::Error, fmt};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::BytesMut;
use tokio_postgres::{
    Row,
    types::{FromSql, IsNull, ToSql, Type, to_sql_checked},
};

use super::{connection::listener, error::failed, full_name};
use crate::store::{
    StoreError,
    records::{Change, Record, Swap, SwapReply, Swapped, Timestamp, Version},
};

pub(super) const SWAP: &str = "select clock, outcomes, present_versions, present_bodies \
    from lock_runtime.swap($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)";
/// Functions are qualified, here and in all statements: one of another role in the search path that
/// fits the arguments better would be called with the rights of this user.
pub(super) const READ: &str = "select lock_runtime.micros(), \
    pg_catalog.array_agg(r.version order by u.place), pg_catalog.array_agg(r.body order by u.place) \
    from pg_catalog.unnest($1) with ordinality u (name, place) left join lock_runtime.record r using (name)";
pub(super) const LOCK: &str =
    "select clock, present_versions, present_bodies from lock_runtime.lock($1)";
pub(super) const LIST: &str = "select name, version, body from lock_runtime.record \
    where name > $2 and name >= $1 and pg_catalog.starts_with(name, $1) order by name limit $3";

/// The arguments of the function `swap`.
#[derive(Default)]
pub(super) struct Arguments {
    names: Vec<String>,
    known: Vec<i64>,
    versions: Vec<i64>,
    bodies: Hidden<Vec<Vec<u8>>>,
    sinces: Vec<i64>,
    fences: Vec<i64>,
    needed: Vec<i64>,
    not_before: i64,
    durable: bool,
    pub(super) each: bool,
    channels: Vec<String>,
    messages: Hidden<Vec<String>>,
}

/// An argument with the tokens of acquisitions, which the driver would write to its log.
#[derive(Default)]
struct Hidden<T>(T);

impl<T> fmt::Debug for Hidden<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("..")
    }
}

impl<T: ToSql> ToSql for Hidden<T> {
    fn to_sql(
        &self,
        of: &Type,
        out: &mut BytesMut,
    ) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        self.0.to_sql(of, out)
    }

    fn accepts(of: &Type) -> bool {
        T::accepts(of)
    }

    to_sql_checked!();
}

impl Arguments {
    /// The arguments of swaps that share a transaction. It is as durable as one of them has to be,
    /// and waits for the latest of their clocks.
    pub(super) fn new<'a>(namespace: &str, swaps: impl IntoIterator<Item = &'a Swap>) -> Self {
        let mut arguments = Self::default();
        for swap in swaps {
            arguments.add(namespace, swap);
        }
        arguments
    }

    fn add(&mut self, namespace: &str, swap: &Swap) {
        let not_before = swap.not_before.micros().cast_signed();
        self.not_before = self.not_before.max(not_before);
        self.durable |= swap.durable;
        for Change {
            name,
            known,
            record,
            fences,
            needed_until,
            ..
        } in &swap.changes
        {
            let number = |version: Version| version.number().cast_signed();
            self.names.push(full_name(namespace, name));
            self.known.push(known.map_or(0, number));
            self.versions.push(number(record.version));
            self.bodies.0.push(record.body.clone());
            let fences = fences.as_ref();
            self.sinces
                .push(fences.map_or(0, |it| (*it.start()).into()));
            self.fences.push(fences.map_or(0, |it| (*it.end()).into()));
            self.needed.push(needed_until.micros().cast_signed());
        }
        for message in &swap.messages {
            self.channels.push(listener::channel(message.to));
            self.messages.0.push(STANDARD.encode(&message.body));
        }
    }

    pub(super) fn typed(&self) -> [(&(dyn ToSql + Sync), Type); 12] {
        [
            (&self.names, Type::TEXT_ARRAY),
            (&self.known, Type::INT8_ARRAY),
            (&self.versions, Type::INT8_ARRAY),
            (&self.bodies, Type::BYTEA_ARRAY),
            (&self.sinces, Type::INT8_ARRAY),
            (&self.fences, Type::INT8_ARRAY),
            (&self.needed, Type::INT8_ARRAY),
            (&self.not_before, Type::INT8),
            (&self.durable, Type::BOOL),
            (&self.each, Type::BOOL),
            (&self.channels, Type::TEXT_ARRAY),
            (&self.messages, Type::TEXT_ARRAY),
        ]
    }
}

pub(super) fn field<'a, T: FromSql<'a>>(row: &'a Row, index: usize) -> Result<T, StoreError> {
    row.try_get(index).map_err(|error| failed(&error))
}

/// Reads the reply to a swap whose records were replaced together.
pub(super) fn swap_reply(row: &Row) -> Result<SwapReply, StoreError> {
    let mut replies = swap_replies(row, 1)?;
    replies.pop().ok_or_else(StoreError::no_reply)
}

/// Reads the replies to swaps of one record each, or the same reply for each record of one swap.
pub(super) fn swap_replies(row: &Row, count: usize) -> Result<Vec<SwapReply>, StoreError> {
    let (now, outcomes): (_, &str) = (timestamp(row)?, field(row, 1)?);
    let reply = |outcome| SwapReply::new(now, outcome);
    match outcomes {
        "e" => return Ok(vec![reply(Swapped::Early); count]),
        "g" => return Ok(vec![reply(Swapped::Guarded)]),
        _ => {}
    }
    let mut present = present(row, 2)?.into_iter();
    let outcome = |outcome| match outcome {
        b'd' => Swapped::Done,
        _ => Swapped::Conflict(vec![present.next().flatten()]),
    };
    Ok(outcomes.bytes().map(outcome).map(reply).collect())
}

pub(super) fn timestamp(row: &Row) -> Result<Timestamp, StoreError> {
    Ok(Timestamp::from_micros(
        field::<i64>(row, 0)?.cast_unsigned(),
    ))
}

/// The elements of an array.
///
/// The driver reserves memory for as many as the array states. In a damaged reply these may be
/// more than the array has bytes, and more than the machine has memory, which ends the process.
#[derive(Debug)]
struct Elements<T>(Vec<T>);

impl<'a, T: FromSql<'a>> FromSql<'a> for Elements<T> {
    fn from_sql(of: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
        // The number of dimensions, two more words, and for each dimension its length and its
        // first index; then the length of each element, and the element.
        let word = |index: usize| {
            let bytes = raw.get(4 * index..4 * index + 4)?;
            Some(u32::from_be_bytes(bytes.try_into().ok()?))
        };
        let dimensions = word(0).ok_or("an array without a head")?;
        let count = match dimensions {
            0 => 0,
            _ => word(3).ok_or("an array without a length")?,
        };
        if dimensions > 1 || count as usize > raw.len() / 4 {
            return Err("an array that is longer than its reply".into());
        }
        Vec::from_sql(of, raw).map(Self)
    }

    fn accepts(of: &Type) -> bool {
        <Vec<T> as FromSql>::accepts(of)
    }
}

/// Reads the arrays of versions and bodies that begin at a column.
pub(super) fn present(row: &Row, column: usize) -> Result<Vec<Option<Record>>, StoreError> {
    let versions: Option<Elements<Option<i64>>> = field(row, column)?;
    let bodies: Option<Elements<Option<Vec<u8>>>> = field(row, column + 1)?;
    let Some((Elements(versions), Elements(bodies))) = versions.zip(bodies) else {
        return Ok(Vec::new());
    };
    let records = versions.into_iter().zip(bodies);
    Ok(records
        .map(|(version, body)| record(version, body))
        .collect())
}

pub(super) fn record(version: Option<i64>, body: Option<Vec<u8>>) -> Option<Record> {
    let version = Version::from_number(version?.cast_unsigned())?;
    Some(Record::new(version, body?))
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio_postgres::{Config, NoTls};

    use super::*;
    use crate::store::{
        Token,
        records::{Message, RecordName},
    };

    fn swap(durable: bool, not_before: u64) -> Swap {
        let record = Record::new(Version::random(), Vec::new());
        let end = Timestamp::from_micros(u64::MAX >> 1);
        let change = Change::new(RecordName::new("a"), None, record, end);
        let mut swap = Swap::new(vec![change], Timestamp::from_micros(not_before));
        swap.durable = durable;
        swap
    }

    #[test]
    fn an_array_that_is_longer_than_its_reply_is_an_error() {
        let array = |dimensions: u32, count: u32| {
            let words = [dimensions, 0, Type::BYTEA.oid(), count, 1, 1];
            let words = words.iter().flat_map(|word| word.to_be_bytes());
            words.chain([7]).collect::<Vec<u8>>()
        };
        let read = |raw: &[u8]| {
            let read = Elements::<Option<Vec<u8>>>::from_sql(&Type::BYTEA_ARRAY, raw);
            read.map(|Elements(elements)| elements)
        };
        assert_eq!(read(&array(1, 1)).unwrap(), [Some(vec![7])]);
        assert_eq!(read(&array(0, 0)[..12]).unwrap(), []);
        for (dimensions, count) in [(1, 2), (1, 1_929_379_841), (1, u32::MAX), (2, 1), (9, 9)] {
            read(&array(dimensions, count)).unwrap_err();
        }
        for length in 0..array(1, 1).len() {
            read(&array(1, 1)[..length]).unwrap_err();
        }
        // Before the driver reserves memory: this one has six words.
        for count in [7, 24, 100, u32::MAX] {
            let error = read(&array(1, count)).unwrap_err().to_string();
            assert_eq!(error, "an array that is longer than its reply", "{count}");
        }
    }

    #[test]
    fn arguments_and_arrays_are_of_the_types_of_their_elements() {
        type Bodies = Vec<Vec<u8>>;
        for (of, expected) in [(Type::BYTEA_ARRAY, true), (Type::INT8_ARRAY, false)] {
            assert_eq!(<Hidden<Bodies> as ToSql>::accepts(&of), expected, "{of}");
            let elements = <Elements<Option<Vec<u8>>> as FromSql>::accepts(&of);
            assert_eq!(elements, expected, "{of}");
        }
    }

    /// A row that a function of the store has returned, from a server at the other end of a pipe.
    async fn row(outcomes: &str, present: &[Option<(i64, &[u8])>]) -> Row {
        let message = |kind: u8, body: &[u8]| {
            let length = 4 + i32::try_from(body.len()).unwrap();
            [&[kind][..], &length.to_be_bytes(), body].concat()
        };
        let sized = |value: &[u8]| {
            let length = i32::try_from(value.len()).unwrap();
            [&length.to_be_bytes()[..], value].concat()
        };
        let array = |of: Type, elements: Vec<Option<Vec<u8>>>| {
            let count = u32::try_from(elements.len()).unwrap();
            let head = [1, 1, of.oid(), count, 1].map(u32::to_be_bytes).concat();
            let element = |element: Option<Vec<u8>>| match element {
                Some(element) => sized(&element),
                None => (-1_i32).to_be_bytes().to_vec(),
            };
            let elements: Vec<_> = elements.into_iter().flat_map(element).collect();
            [head, elements].concat()
        };
        let versions = |it: &Option<(i64, &[u8])>| it.map(|(it, _)| it.to_be_bytes().to_vec());
        let bodies = |it: &Option<(i64, &[u8])>| it.map(|(_, body)| body.to_vec());
        let fields = [
            (Type::INT8, 9_i64.to_be_bytes().to_vec()),
            (Type::TEXT, outcomes.into()),
            (
                Type::INT8_ARRAY,
                array(Type::INT8, present.iter().map(versions).collect()),
            ),
            (
                Type::BYTEA_ARRAY,
                array(Type::BYTEA, present.iter().map(bodies).collect()),
            ),
        ];
        let count = [0, 4];
        let column = |(of, _): &(Type, _)| {
            let head = [&b"c\0"[..], &[0; 6], &of.oid().to_be_bytes(), &[0; 6]];
            [&head.concat()[..], &[0, 1]].concat()
        };
        let columns: Vec<_> = fields.iter().flat_map(column).collect();
        let values: Vec<_> = fields.iter().flat_map(|(_, value)| sized(value)).collect();
        let ready = message(b'Z', b"I");
        let reply = [
            message(b'1', b""),
            message(b'2', b""),
            message(b't', &[0, 0]),
            message(b'T', &[&count[..], &columns].concat()),
            message(b'D', &[&count[..], &values].concat()),
            message(b'C', b"SELECT 1\0"),
            ready.clone(),
        ];
        let greeting = [message(b'R', &[0; 4]), ready].concat();

        let (ours, mut theirs) = tokio::io::duplex(1 << 16);
        let server = async {
            for answer in [greeting, reply.concat()] {
                theirs
                    .read_buf(&mut BytesMut::with_capacity(1 << 12))
                    .await
                    .unwrap();
                theirs.write_all(&answer).await.unwrap();
            }
        };
        let mut config = Config::new();
        config.user("app");
        let asked = async {
            let (client, connection) = config.connect_raw(ours, NoTls).await.unwrap();
            let query = client.query_typed("select", &[]);
            let rows = tokio::select! {
                rows = query => rows.unwrap(),
                ended = connection => panic!("{ended:?}"),
            };
            rows.into_iter().next().unwrap()
        };
        tokio::join!(server, asked).1
    }

    #[tokio::test]
    async fn each_outcome_of_a_swap_is_read_with_the_present_record_of_a_conflict() {
        let stored = Record::new(Version::from_number(5).unwrap(), vec![1, 2]);
        let conflict = |record| Swapped::Conflict(vec![record]);
        for (outcomes, found, count, expected) in [
            ("d", &[][..], 1, vec![Swapped::Done]),
            ("e", &[], 2, vec![Swapped::Early, Swapped::Early]),
            ("g", &[], 1, vec![Swapped::Guarded]),
            (
                "cdc",
                &[Some((5, &[1, 2][..])), None],
                3,
                vec![
                    conflict(Some(stored.clone())),
                    Swapped::Done,
                    conflict(None),
                ],
            ),
        ] {
            let row = row(outcomes, found).await;
            let replies = swap_replies(&row, count).unwrap();
            let outcomes: Vec<_> = replies.iter().map(|reply| &reply.outcome).collect();
            assert_eq!(outcomes, expected.iter().collect::<Vec<_>>());
            let now = Timestamp::from_micros(9);
            assert!(replies.iter().all(|reply| reply.now == now));
            let reply = swap_reply(&row).unwrap();
            assert_eq!(reply.outcome, *expected.last().unwrap());
        }
        let row = row("", &[None, Some((5, &[1, 2]))]).await;
        assert_eq!(present(&row, 2).unwrap(), [None, Some(stored)]);
    }

    #[test]
    fn a_group_is_as_durable_and_as_late_as_one_of_its_swaps_has_to_be() {
        let swaps = [swap(true, 7), swap(false, 5), swap(false, 9)];
        for order in [[0, 1, 2], [1, 0, 2], [2, 1, 0], [1, 2, 0]] {
            let arguments = Arguments::new("lock", order.map(|index| &swaps[index]));
            assert!(arguments.durable, "{order:?}");
            assert_eq!(arguments.not_before, 9, "{order:?}");
        }
        let arguments = Arguments::new("lock", &swaps[1..]);
        assert!(!arguments.durable);
    }

    #[test]
    fn the_driver_cannot_log_the_content_of_records_and_messages() {
        let (token, client) = (Token::random().to_bytes(), Token::random().client());
        let mut swap = swap(true, 7);
        swap.changes[0].record.body = token.to_vec();
        swap.messages = vec![Message::new(client, token.to_vec())];
        let arguments = Arguments::new("app", [&swap]);
        let logged = format!("{:?}", arguments.typed());
        assert!(logged.contains("app:a"), "{logged}");
        for hidden in [format!("{token:?}"), STANDARD.encode(token)] {
            assert!(!logged.contains(&hidden), "{logged}");
        }
    }
}

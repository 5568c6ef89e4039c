//! The messages between clients: their events, and the records in them.

use super::{step::clock::Clock, *};
use crate::request::spec::LockKind;

/// A change to a record with a body of this length. Random versions would differ in length.
fn change(name: &str, body: usize) -> Change {
    let record = Record::new(Version::from_number(1 << 62).unwrap(), vec![7; body]);
    let end = Timestamp::from_micros(NOW);
    Change::new(RecordName::new(name.to_owned()), None, record, end)
}

fn sent(event: &StoreEvent, change: &Change, shows_record: bool) -> Option<Vec<u8>> {
    let now = Timestamp::from_micros(NOW);
    let message = news::message(ClientId::random(), event, change, now, shows_record);
    message.map(|message| message.body)
}

/// Reads a message half a second after it was sent. Returns its event, and the body of its record.
fn read(message: &[u8]) -> (String, Option<usize>) {
    let later = Timestamp::from_micros(NOW).later(Duration::from_millis(500));
    let clock = Clock::default();
    clock.read(later, later, Instant::now());
    let (event, record) = news::read(message, &clock.reading().unwrap()).unwrap();
    (
        format!("{event:?}"),
        record.map(|(_, record)| record.body.len()),
    )
}

fn granted(ttl: Duration) -> StoreEvent {
    let hold = Hold::new(
        LockKey::new("a").unwrap(),
        Mode::Exclusive,
        Token::from_bytes([5; 16]),
    );
    let fence = FencingToken::new(NOW).unwrap();
    StoreEvent::granted(hold, Grant::new(fence, ttl))
}

fn free_in(key: &str, ttl: Duration) -> StoreEvent {
    let (key, kind) = (LockKey::new(key).unwrap(), LockKind::Lock);
    StoreEvent::FreeIn { key, kind, ttl }
}

/// The rest of the time is counted by the clock of the database. Only a grant has the record.
#[tokio::test(start_paused = true)]
async fn each_event_of_a_lock_arrives_and_a_grant_with_its_record() {
    let [second, rest] = [1000, 500].map(Duration::from_millis);
    let token = Token::from_bytes([5; 16]);
    let revoked = StoreEvent::Revoked { token };
    for (event, expected, has_record) in [
        (granted(second), granted(rest), true),
        (free_in("a", second), free_in("a", rest), false),
        (revoked.clone(), revoked, false),
    ] {
        for shows_record in [false, true] {
            let message = sent(&event, &change("a", 9), shows_record).unwrap();
            let record = (shows_record && has_record).then_some(9);
            assert_eq!(read(&message), (format!("{expected:?}"), record));
        }
    }
    for event in [StoreEvent::Disconnected, StoreEvent::Reconnected] {
        assert_eq!(sent(&event, &change("a", 9), true), None);
    }
}

#[tokio::test(start_paused = true)]
async fn a_message_has_4096_bytes_at_most_and_goes_without_its_record_before() {
    let grant = granted(Duration::from_secs(1));
    let message = |body| sent(&grant, &change("a", body), true).unwrap();
    // The length of a body of this size has two bytes.
    let room = Message::MAX_BYTES - (message(1000).len() - 1000);
    assert_eq!(message(room).len(), Message::MAX_BYTES);
    assert_eq!(read(&message(room)).1, Some(room));
    assert_eq!(read(&message(room + 1)).1, None);

    let event = free_in("a", Duration::ZERO);
    let named = |length| sent(&event, &change(&"n".repeat(length), 0), false);
    let room = Message::MAX_BYTES - (named(1000).unwrap().len() - 1000);
    let longest = named(room).map(|message| message.len());
    assert_eq!(longest, Some(Message::MAX_BYTES));
    assert_eq!(named(room + 1), None);
}

#[cfg(feature = "postgres")]
#[test]
fn only_the_names_of_clients_begin_with_the_first_of_them() {
    let client = RecordName::of_client(ClientId::random());
    let first = client.first_client().expect("that of a client");
    assert!(client.as_str().starts_with(first));
    let key = LockKey::new("client").unwrap();
    for kind in [LockKind::Lock, LockKind::Permits] {
        let name = RecordName::of_lock(&key, kind);
        assert_eq!(name.first_client(), None);
        assert!(!name.as_str().starts_with(first));
    }
}

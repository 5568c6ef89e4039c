//! The records and messages of a store of records.

use super::{
    RecordName, Timestamp, news,
    step::{body::Body, clock::Clock},
};
use crate::{
    fuzz::{refused_readably, within_bounds},
    shell::time::Instant,
    store::StoreEvent,
};

#[test]
fn bodies() {
    bolero::check!().for_each(|input: &[u8]| {
        let name = RecordName::new("a");
        let now = Timestamp::from_micros(1_800_000_000_000_000);
        let body = within_bounds(input, || {
            let body = refused_readably(Body::read(&name, input))?;
            body.is_taken(now);
            Some(body)
        });
        if let Some(body) = body {
            let written = body.write(&name).unwrap();
            assert_eq!(Body::read(&name, &written).unwrap(), body);
        }
    });
}

#[test]
fn messages() {
    bolero::check!().for_each(|input: &[u8]| {
        let clock = Clock::default();
        let now = Timestamp::from_micros(1_800_000_000_000_000);
        clock.read(now, now, Instant::now());
        let reading = clock.reading().unwrap();
        match within_bounds(input, || news::read(input, &reading)).map(|(event, _)| event) {
            Some(StoreEvent::Granted { hold, grant, .. }) => {
                assert!(grant.ttl <= crate::store::Grant::HANDOFF_LEASE);
                assert!(hold.key.as_str().len() <= crate::LockKey::MAX_BYTES);
            }
            Some(StoreEvent::Wanted { key, .. }) => {
                assert!(key.as_str().len() <= crate::LockKey::MAX_BYTES);
            }
            Some(StoreEvent::FreeIn { .. } | StoreEvent::Revoked { .. }) | None => {}
            Some(other) => panic!("{other:?}"),
        }
    });
}

//! The store of the guide, as a third party would write one: the records are in a file.

mod crash;

use std::{
    collections::BTreeMap,
    fs::{self, File},
    num::NonZeroU32,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use futures_util::TryStreamExt as _;
use lock_runtime::store::Instant;
use lock_runtime::{
    LockClient, LockErrorKind, LockKey, LockKind, LockSpec, Loss, Mode,
    operator::Revocation,
    store::{
        AcquireAllReply, Hold, KeyRequest, RecordStore, Records, Store, StoreErrorKind, Token,
        records::{RecordName, Swap, Swapped, Timestamp},
    },
};
use rustix::fs::{FlockOperation, flock};
use serde_json::Value;
use tempfile::TempDir;
use tokio::time::sleep;

use lock_tests::place::LONG;

pub(super) use lock_tests::files::FileRecords;

lock_conformance::conformance!({
    let place = Arc::new(Place::new());
    async move || place.store()
});

lock_conformance::conformance!(records: {
    let place = Arc::new(Place::new());
    async move || Arc::new(place.records()) as Arc<dyn Records>
});

/// A directory with locks.
pub(super) struct Place(TempDir);

impl Place {
    pub(super) fn new() -> Self {
        // In memory, where that is a directory: a call may not wait as long as a busy disk takes.
        let memory = Path::new("/dev/shm");
        Self(match memory.is_dir() {
            true => tempfile::tempdir_in(memory).unwrap(),
            false => tempfile::tempdir().unwrap(),
        })
    }

    pub(super) fn records(&self) -> FileRecords {
        FileRecords::new(self.0.path())
    }

    fn file(&self) -> PathBuf {
        self.0.path().join("records.json")
    }

    /// Runs `job` while no client reads or changes the records, as some do in the background.
    fn alone<T>(&self, job: impl FnOnce() -> T) -> T {
        let lock = self.0.path().join("lock");
        let lock = File::options().create(true).append(true).open(lock);
        let lock = lock.unwrap();
        flock(&lock, FlockOperation::LockExclusive).unwrap();
        job()
    }

    /// A new store, as another process would have it.
    fn store(&self) -> Arc<dyn Store> {
        Arc::new(RecordStore::new(self.records()))
    }

    fn client(&self) -> LockClient {
        LockClient::with_store(self.store())
    }
}

fn two() -> NonZeroU32 {
    NonZeroU32::new(2).unwrap()
}

async fn names(locks: &LockClient, prefix: &str) -> Vec<String> {
    let listed: Vec<_> = locks.list(prefix).try_collect().await.unwrap();
    let listed = listed.into_iter();
    let mut names: Vec<_> = listed.map(|lock| lock.key.as_str().to_owned()).collect();
    names.sort();
    names
}

#[tokio::test]
async fn an_operator_lists_inspects_and_revokes() {
    let place = Place::new();
    let (locks, operator) = (place.client(), place.client());
    // More than a page of the list.
    let keys: Vec<_> = (0..25).map(|number| format!("k:{number:03}")).collect();
    let _many = locks.all(&keys).acquire().await.unwrap();
    let guard = locks.exclusive("a").acquire().await.unwrap();
    assert_eq!(names(&operator, "k:").await, keys);
    assert_eq!(names(&operator, "k:01").await, keys[10..20]);
    assert_eq!(names(&operator, "").await.len(), 26);

    let seen = operator.inspect("a").await.unwrap();
    assert_eq!(seen.fence, Some(guard.fence()));
    assert_eq!(seen.holders.len(), 1);
    let revoked = operator.revoke("a").await.unwrap();
    assert_eq!(revoked, Revocation::Revoked);
    let lost = guard.release().await.unwrap_err();
    assert!(matches!(lost.kind(), LockErrorKind::Lost(_)), "{lost}");

    // A client that has acquired no lock but these.
    let client = place.client();
    let several = client.all(["b", "c"]).lease(Duration::from_secs(1));
    let several = several.try_acquire().await.unwrap().unwrap();
    let revoked = operator.revoke("c").await.unwrap();
    assert_eq!(revoked, Revocation::Revoked);
    several.lost().await;
    let lost = several.verify().await.unwrap_err();
    assert_eq!(lost.kind(), LockErrorKind::Lost(Loss::Revoked));
}

#[tokio::test]
async fn a_lock_that_is_not_granted_has_no_new_fencing_token() {
    let place = Place::new();
    let store = place.store();
    let request = |key: &str, token: Token| {
        let hold = Hold::new(LockKey::new(key).unwrap(), Mode::Exclusive, token);
        KeyRequest::new(hold, LockSpec::MIN_LEASE, Instant::now() + LONG).queued()
    };
    let free = request("free", Token::random());
    store.acquire(&free).await.unwrap();
    for _ in 0..2 {
        store
            .acquire(&request("busy", Token::random()))
            .await
            .unwrap();
    }
    sleep(LockSpec::MIN_LEASE * 2).await;
    // The request lets the waiter of one lock have it, and acquires none of them.
    let both = ["busy", "free"].map(|key| request(key, Token::random()));
    let reply = store.acquire_all(&both).await.unwrap();
    assert!(
        matches!(reply, AcquireAllReply::Refused { .. }),
        "{reply:?}"
    );
    let inspect = async |key: &str| {
        let key = LockKey::new(key).unwrap();
        store.inspect(&key, LockKind::Lock).await.unwrap()
    };
    assert_eq!(inspect("busy").await.holders.len(), 1);
    let (busy, free) = (inspect("busy").await.fence, inspect("free").await.fence);
    assert!(free < busy, "{free:?}, {busy:?}");
}

/// The records of permits have names between those of the locks.
#[tokio::test]
async fn a_page_may_end_among_the_permits() {
    let place = Place::new();
    let locks = place.client();
    // With or without the record of a client, the twentieth one is of permits.
    let first: Vec<_> = (0..18).map(|number| format!("a:{number:02}")).collect();
    let _first = locks.all(&first).acquire().await.unwrap();
    let mut others = vec![locks.exclusive("z").acquire().await.unwrap()];
    for key in ["1", "2", "3"] {
        others.push(locks.permits(key, two()).acquire().await.unwrap());
    }
    let listed = names(&place.client(), "").await;
    assert_eq!(listed[..3], ["1", "2", "3"]);
    assert_eq!(listed[listed.len() - 1], "z");
    assert_eq!(listed.len(), 22);
}

#[tokio::test]
async fn any_name_of_a_lock_is_its_own() {
    let place = Place::new();
    let (locks, others) = (place.client(), place.client());
    let longest = "\u{e9}".repeat(LockKey::MAX_BYTES / 2);
    let hostile = [
        "../lock",
        "/",
        "/etc/passwd",
        ".",
        "..",
        "a",
        "A",
        "a/b",
        "a%2Fb",
        "a\\b",
        "\"",
        "{a}",
        "*",
        "lock",
        "records.json",
        "client",
        " ",
        "\u{e9}",
        "e\u{301}",
        "\u{10ffff}",
        &longest,
    ];
    let mut held = BTreeMap::new();
    for name in hostile {
        let name = LockKey::new(name).unwrap();
        let guard = locks.exclusive(&name).acquire().await.unwrap();
        let permit = locks.permits(&name, two()).acquire().await.unwrap();
        held.insert(name.as_str().to_owned(), (guard, permit));
    }
    let listed = names(&others, "").await;
    assert_eq!(listed.len(), 2 * hostile.len());
    for (name, (guard, permit)) in held {
        let free = others.exclusive(name.as_str()).try_acquire().await.unwrap();
        assert!(free.is_none() && listed.contains(&name), "{name}");
        guard.release().await.unwrap();
        permit.release().await.unwrap();
    }
    let files = place.alone(|| fs::read_dir(place.0.path()).unwrap().count());
    assert_eq!(files, 2);
}

#[tokio::test]
async fn old_records_are_removed_and_others_are_not() {
    let place = Place::new();
    let locks = place.client();
    for key in ["old", "new"] {
        let guard = locks.exclusive(key).acquire().await.unwrap();
        guard.release().await.unwrap();
    }
    let past = Timestamp::of_system().micros() - 1;
    place.alone(|| {
        let text = fs::read_to_string(place.file()).unwrap();
        let mut table: Value = serde_json::from_str(&text).unwrap();
        table["old"]["needed_until"] = past.into();
        fs::write(place.file(), table.to_string()).unwrap();
    });

    // A change of another record.
    let guard = place.client().exclusive("a").acquire().await.unwrap();
    let names = ["old", "new", "a"].map(RecordName::new);
    let records = place.records().read(&names).await.unwrap().records;
    let kept: Vec<_> = records.iter().map(Option::is_some).collect();
    assert_eq!(kept, [false, true, true]);
    guard.release().await.unwrap();
}

#[tokio::test]
async fn a_swap_before_its_time_changes_nothing() {
    let place = Place::new();
    let (hour, now) = (3_600_000_000, Timestamp::of_system().micros());
    for (not_before, expected) in [(now, Swapped::Done), (now + hour, Swapped::Early)] {
        let swap = Swap::new(Vec::new(), Timestamp::from_micros(not_before));
        let reply = place.records().swap(&swap).await.unwrap();
        assert_eq!(reply.outcome, expected);
        assert!(reply.now.micros() >= now);
    }
}

#[tokio::test]
async fn foreign_data_and_a_missing_directory_are_errors() {
    let place = Place::new();
    let gone = FileRecords::new(place.0.path().join("gone"));
    let error = gone.read(&[]).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);

    for foreign in ["", "[1, 2", r#"{"a":{"version":1}}"#] {
        fs::write(place.file(), foreign).unwrap();
        let read = place.records().read(&[RecordName::new("a")]).await;
        assert_eq!(read.unwrap_err().kind(), StoreErrorKind::ForeignKey);
        place.client().exclusive("a").acquire().await.unwrap_err();
        assert_eq!(fs::read_to_string(place.file()).unwrap(), foreign);
    }
}

//! The silences and the outages of a database, and the requests that are refused meanwhile.

use tokio::time::timeout;

use super::{
    site::{Events, Fate, Site},
    *,
};
use crate::store::StoreError;

const MILLI: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

/// A store of a database that can be out of reach.
struct Bench {
    site: Arc<Site>,
    store: RecordStore,
    events: Arc<Events>,
}

impl Bench {
    fn new(fate: Fate, unavailable_after: Option<Duration>) -> Self {
        let site = Arc::new(Site::new(&Database::new(), Duration::ZERO));
        site.set(fate);
        let store = site.store().unavailable_after(unavailable_after);
        let events = Events::of(&store);
        Self {
            site,
            store,
            events,
        }
    }

    /// Makes a request that fails. Returns its error and the number of calls that it has made.
    async fn refused(&self, if_busy: IfBusy) -> (StoreError, usize) {
        let calls = self.site.calls();
        let error = self.store.acquire(&request(if_busy)).await.unwrap_err();
        (error, self.site.calls() - calls)
    }

    /// Makes a request that is given up after a time without an answer.
    async fn given_up(&self, after: Duration) {
        let request = request(IfBusy::Refuse);
        let asked = timeout(after, self.store.acquire(&request)).await;
        assert!(asked.is_err(), "{asked:?}");
    }

    /// Returns whether a request that does not wait is refused because of an outage.
    async fn is_out(&self) -> bool {
        let request = request(IfBusy::Refuse);
        match timeout(MILLI, self.store.acquire(&request)).await {
            Ok(Err(error)) => error.is_unsent(),
            _ => false,
        }
    }
}

fn unavailable() -> StoreError {
    StoreError::new(StoreErrorKind::Unavailable, "connection refused")
}

#[tokio::test(start_paused = true)]
async fn requests_are_refused_without_a_call_until_the_database_answers_a_probe() {
    let bench = Bench::new(Fate::Served, Some(SECOND));
    let holder = request(IfBusy::Refuse);
    acquire(&bench.store, &holder).await;
    bench.site.set(Fate::Refused(unavailable()));
    let (error, _) = bench.refused(IfBusy::Refuse).await;
    assert!(!error.is_unsent(), "{error:?}");
    // The first probe comes at once, the next one not before 50 ms.
    sleep(MILLI).await;
    let calls = bench.site.calls();
    for _ in 0..20 {
        let (error, _) = bench.refused(IfBusy::Refuse).await;
        assert!(error.is_unsent() && !error.ends_waits(), "{error:?}");
        sleep(MILLI).await;
    }
    assert_eq!(bench.site.calls(), calls, "one task probes the database");
    // A request that waits makes a call for a second.
    let (error, calls) = bench.refused(IfBusy::Queue).await;
    assert!(calls > 0 && !error.is_unsent(), "{error:?}");
    assert_eq!(bench.events.shown(), [""; 0]);
    sleep(SECOND).await;
    let (error, _) = bench.refused(IfBusy::Queue).await;
    assert!(error.is_unsent() && error.ends_waits(), "{error:?}");
    assert_eq!(bench.events.shown(), ["Disconnected"]);
    // A renewal makes a call in any case.
    let renewals = [Renewal::new(holder.hold, LEASE)];
    let error = bench.store.renew(&renewals).await.remove(0).unwrap_err();
    assert!(!error.is_unsent(), "{error:?}");

    bench.site.set(Fate::Served);
    sleep(SECOND).await;
    assert_eq!(bench.events.shown(), ["Disconnected", "Reconnected"]);
    let reply = bench.store.acquire(&request(IfBusy::Queue)).await.unwrap();
    assert!(matches!(reply, AcquireReply::Queued { .. }), "{reply:?}");
}

#[tokio::test(start_paused = true)]
async fn only_an_error_without_an_answer_begins_an_outage() {
    use StoreErrorKind::{Blocked, Forbidden, Full, Unauthenticated, Unavailable};
    let of = |kind| StoreError::new(kind, "refused");
    let errors = vec![
        (of(Unavailable), true),
        (of(Unauthenticated).passing(true), true),
        (of(Unauthenticated), false),
        (of(Forbidden), false),
        (of(Blocked), false),
        (of(Full), false),
    ];
    #[cfg(feature = "postgres")]
    let errors = {
        use crate::store::error::Shows::{Answer, Nothing};
        let without = [Answer, Nothing].map(|shows| (of(Unavailable).showing(shows), false));
        [errors, without.to_vec()].concat()
    };
    for (error, begins) in errors {
        let bench = Bench::new(Fate::Refused(error.clone()), None);
        bench.refused(IfBusy::Refuse).await;
        assert_eq!(bench.is_out().await, begins, "{error:?}");
    }
}

#[cfg(feature = "postgres")]
#[tokio::test(start_paused = true)]
async fn an_error_of_a_call_that_was_not_made_ends_no_outage() {
    use crate::store::error::Shows;
    let bench = Bench::new(Fate::Refused(unavailable()), None);
    bench.refused(IfBusy::Refuse).await;
    let silent = unavailable().showing(Shows::Nothing);
    bench.site.set(Fate::Refused(silent));
    let renewals = [Renewal::new(request(IfBusy::Refuse).hold, LEASE)];
    let error = bench.store.renew(&renewals).await.remove(0).unwrap_err();
    assert!(!error.is_unsent(), "{error:?}");
    assert!(bench.is_out().await);
}

#[tokio::test(start_paused = true)]
async fn a_silence_of_two_seconds_or_of_the_circuit_breaker_is_probed_and_no_shorter_one() {
    for (unavailable_after, silence, is_probed) in [
        (None, 2000, true),
        (None, 1990, false),
        (Some(500), 500, true),
        (Some(500), 490, false),
        (Some(60_000), 2000, true),
    ] {
        let case = format!("{silence} ms of {unavailable_after:?}");
        let bench = Bench::new(Fate::Silent, unavailable_after.map(Duration::from_millis));
        bench.given_up(MILLI * silence).await;
        sleep(SECOND * 2).await;
        assert_eq!(bench.site.calls() > 1, is_probed, "{case}");
        assert_eq!(bench.is_out().await, is_probed, "{case}");
    }
}

/// It may have waited for a change of the record.
#[tokio::test(start_paused = true)]
async fn a_silence_of_one_call_is_no_outage_if_the_database_answers_a_probe() {
    let bench = Bench::new(Fate::Silent, None);
    bench.given_up(SECOND * 2).await;
    bench.site.set(Fate::Served);
    sleep(SECOND).await;
    assert_eq!(bench.site.calls(), 2);
    acquire(&bench.store, &request(IfBusy::Refuse)).await;
    assert_eq!(bench.events.shown(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn calls_that_were_given_up_long_ago_are_no_silence() {
    let bench = Bench::new(Fate::Silent, None);
    bench.given_up(SECOND).await;
    sleep(SECOND * 600).await;
    bench.given_up(SECOND).await;
    sleep(SECOND * 2).await;
    assert_eq!(bench.site.calls(), 2);
    assert!(!bench.is_out().await);
}

//! Old clients, and locks that a client retains.

use lock_runtime::Mode;
use lock_tests::RedisServer;
use tokio::time::Instant;

use super::{
    Duration, LONG, connect,
    old_client::{Names, OldClient},
};

const LEASE: Duration = Duration::from_secs(30);
const RETAINED: Duration = Duration::from_secs(2);

/// It does not ask for the lock to be released, so the retention alone limits its wait. Tokens
/// increase from each to the next.
#[tokio::test]
async fn an_old_client_waits_for_the_end_of_a_retention() {
    let server = RedisServer::start().await;
    let locks = connect(&server.url(), "lock").await.unwrap();
    let names = Names::new("lock", "k", false);
    let mut old = OldClient::connect(&server, "lock").await;
    let mut last = 0;
    for _ in 0..2 {
        let request = locks.exclusive("k").retain(RETAINED).wait(LONG);
        for _ in 0..10 {
            let guard = request.clone().acquire().await.unwrap();
            let fence = guard.fence().number();
            assert!(fence > last, "{fence} after {last}");
            last = fence;
            guard.release().await.unwrap();
        }
        let since = Instant::now();
        let (word, _) = old.acquire(&names, Mode::Exclusive, LEASE, false).await;
        assert_eq!(word, "refused", "it is retained");
        let (word, _) = old.acquire(&names, Mode::Exclusive, LEASE, true).await;
        assert_eq!(word, "queued");
        let fence = old.granted(&names, Mode::Exclusive).await;
        assert!(fence > last, "{fence} after {last}");
        last = fence;
        assert!(since.elapsed() < RETAINED * 4, "{:?}", since.elapsed());
        let waiting = tokio::spawn(request.clone().acquire());
        let released = old.release(&names, Mode::Exclusive).await;
        assert!(
            ["released", "handed_over"].contains(&&*released),
            "{released}"
        );
        let guard = waiting.await.unwrap().unwrap();
        let fence = guard.fence().number();
        assert!(fence > last, "{fence} after {last}");
        last = fence;
        guard.release().await.unwrap();
    }
    locks.shutdown().await;
}

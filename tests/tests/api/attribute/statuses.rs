//! Locked handlers of tonic services.

use std::time::Duration;

use futures_util::FutureExt as _;
use lock_runtime::{LockClient, distributed_lock};
use lock_tests::Captured;
use tonic::{Code, Request, Response, Status};
use tonic_types::StatusExt as _;
use tracing::Level;

struct Inventory {
    locks: LockClient,
}

/// A service trait as tonic generates it.
#[async_trait::async_trait]
trait Stock {
    async fn reserve(&self, request: Request<String>) -> Result<Response<u64>, Status>;
}

#[async_trait::async_trait]
impl Stock for Inventory {
    #[distributed_lock(key("sku:{}", request.get_ref()), client = self.locks.clone(), no_wait, held = lock)]
    async fn reserve(&self, request: Request<String>) -> Result<Response<u64>, Status> {
        let fence = lock.fence().number();
        match request.into_inner().as_str() {
            "unknown" => Err(Status::not_found("no such article")),
            "revoked" => {
                self.locks.revoke(lock.key()).await?;
                std::future::pending().await
            }
            _ => Ok(Response::new(fence)),
        }
    }
}

impl Inventory {
    #[distributed_lock(key = "sku:{sku}", client = self.locks, wait = "10ms")]
    async fn count(&self, sku: &str) -> Result<Response<u64>, Status> {
        Ok(Response::new(sku.len() as u64))
    }
}

fn delay(status: &Status) -> Option<Duration> {
    status
        .get_details_retry_info()
        .and_then(|info| info.retry_delay)
}

#[tokio::test(start_paused = true)]
async fn a_locked_handler_answers_with_a_status() {
    let traces = Captured::new();
    let _collecting = traces.set_default();
    let locks = LockClient::in_memory();
    let inventory = Inventory {
        locks: locks.clone(),
    };
    let reserve = async |sku: &str| inventory.reserve(Request::new(sku.to_owned())).await;
    assert!(reserve("a").await.unwrap().into_inner() > 0);
    assert_eq!(inventory.count("a").await.unwrap().into_inner(), 1);
    assert_eq!(reserve("unknown").await.unwrap_err().code(), Code::NotFound);

    let guard = locks.exclusive("sku:secret").acquire().await.unwrap();
    for (status, message) in [
        (
            reserve("secret").await.unwrap_err(),
            "The resource is in use.",
        ),
        (
            inventory.count("secret").await.unwrap_err(),
            "The resource was in use for as long as the request could wait.",
        ),
    ] {
        assert_eq!((status.code(), status.message()), (Code::Aborted, message));
        assert_eq!(delay(&status), Some(Duration::from_secs(1)));
        // The key is for the log only.
        assert!(!format!("{status:?}").contains("secret"), "{status:?}");
    }
    let told = traces
        .events()
        .into_iter()
        .filter(|event| event.message == "request refused");
    let told: Vec<_> = told.map(|event| (event.level, event.fields)).collect();
    assert_eq!(told.len(), 2);
    assert!(told.iter().all(|(level, fields)| *level == Level::DEBUG && fields["error"].contains("sku:secret")));
    guard.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_error_after_a_loss_has_no_retry_info() {
    let traces = Captured::new();
    let _collecting = traces.set_default();
    let locks = LockClient::in_memory();
    let inventory = Inventory {
        locks: locks.clone(),
    };
    let lost = inventory
        .reserve(Request::new("revoked".to_owned()))
        .await
        .unwrap_err();
    assert_eq!(
        (lost.code(), lost.details()),
        (Code::Aborted, [].as_slice())
    );
    assert!(lost.message().contains("may have had effects"), "{lost:?}");
    let warned = traces
        .wait_for(|event| event.message == "request refused")
        .now_or_never()
        .unwrap();
    assert_eq!(
        (warned.level, warned.field("code")),
        (Level::WARN, Some("lost_revoked"))
    );

    let long = "x".repeat(600);
    let invalid = inventory.reserve(Request::new(long)).await.unwrap_err();
    assert_eq!(
        (invalid.code(), invalid.details()),
        (Code::InvalidArgument, [].as_slice())
    );
    locks.shutdown().await;
    let ended = inventory
        .reserve(Request::new("a".to_owned()))
        .await
        .unwrap_err();
    assert_eq!(
        (ended.code(), ended.details()),
        (Code::Unavailable, [].as_slice())
    );

    let full = LockClient::builder()
        .max_waiters_in_all(0)
        .build_in_memory()
        .unwrap();
    let full = Inventory { locks: full }.count("a").await.unwrap_err();
    assert_eq!(
        (full.code(), delay(&full)),
        (Code::ResourceExhausted, Some(Duration::from_secs(1)))
    );
}

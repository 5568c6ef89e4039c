//! A transaction of one row under a lock, with and without a check of the fencing token in it.

use std::sync::Arc;

use lock_runtime::{LockClient, LockGuard, fencing};
use lock_tests::postgres;
use tokio::sync::Mutex;
use tokio_postgres::{Client, Statement};

use crate::turns::Call;

#[derive(Clone, Copy)]
pub(super) enum Check {
    None,
    Guard,
    Fenced,
}

/// Transactions on one account, one after the other.
#[derive(Clone)]
pub(super) struct Payment {
    shared: Arc<Shared>,
    check: Check,
}

struct Shared {
    client: Mutex<Client>,
    update: Statement,
    account: i64,
    /// The lock of the account.
    guard: LockGuard,
}

const ACCOUNTS: &str =
    "create table if not exists account (id bigint primary key, balance bigint not null)";

impl Payment {
    /// Connects a client for each account, and acquires the locks of all accounts.
    pub(super) async fn prepare(url: &str, locks: &LockClient, accounts: usize) -> Vec<Self> {
        let setup = postgres::connect(url).await;
        fencing::install(&setup).await.expect(ANSWERS);
        setup.batch_execute(ACCOUNTS).await.expect(ANSWERS);
        let mut payments = Vec::with_capacity(accounts);
        for account in 0..accounts as i64 {
            let create = "insert into account values ($1, 0)";
            setup.execute(create, &[&account]).await.expect(ANSWERS);
            let client = postgres::connect(url).await;
            let update = "update account set balance = balance - 1 where id = $1";
            let update = client.prepare(update).await.expect(ANSWERS);
            let lock = locks.exclusive(format!("account:{account}"));
            let shared = Shared {
                client: Mutex::new(client),
                update,
                account,
                guard: lock.acquire().await.expect("no other client uses this key"),
            };
            payments.push(Self {
                shared: Arc::new(shared),
                check: Check::None,
            });
        }
        payments
    }

    pub(super) fn with(&self, check: Check) -> Self {
        Self {
            check,
            ..self.clone()
        }
    }
}

const ANSWERS: &str = "our own server answers";

impl Call for Payment {
    async fn call(&self) {
        let Shared {
            client,
            update,
            account,
            guard,
        } = &*self.shared;
        let mut client = client.lock().await;
        let transaction = client.transaction().await.expect(ANSWERS);
        let checked = match self.check {
            Check::None => Ok(()),
            Check::Guard => {
                let name = format!("lock:account:{account}");
                fencing::guard(&transaction, &name, guard.fence()).await
            }
            Check::Fenced => {
                let resource = format!("account:{account}");
                fencing::fenced(&transaction, &resource, guard.fence()).await
            }
        };
        checked.expect("the lock is held");
        let updated = transaction.execute(update, &[account]).await;
        assert_eq!(updated.expect(ANSWERS), 1);
        transaction.commit().await.expect(ANSWERS);
    }
}

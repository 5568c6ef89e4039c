//! A transaction of one row under a lock, with and without a check of the fencing token in it.

use std::sync::Arc;

use futures_util::future::join3;
use lock_runtime::{LockClient, LockGuard, fencing};
use lock_tests::postgres;
use tokio::sync::Mutex;
use tokio_postgres::{Client, Error, Statement};

use crate::turns::Call;

#[derive(Clone, Copy)]
pub(super) enum Check {
    None,
    /// A query that checks nothing: the least that a check by a statement of its own costs.
    Query,
    Statement(Function),
    /// A condition of the update.
    Condition(Function),
}

#[derive(Clone, Copy)]
pub(super) enum Function {
    Guard,
    Fenced,
}

/// The round trips of a transaction.
#[derive(Clone, Copy)]
pub(super) enum Trips {
    One,
    /// One for each statement.
    Each,
}

/// Transactions on one account, one after the other.
#[derive(Clone)]
pub(super) struct Payment {
    shared: Arc<Shared>,
    check: Check,
    trips: Trips,
}

struct Shared {
    client: Mutex<Client>,
    update: Statement,
    update_if_guarded: Statement,
    update_if_fenced: Statement,
    account: i64,
    /// The lock of the account.
    guard: LockGuard,
}

const ACCOUNTS: &str =
    "create table if not exists account (id bigint primary key, balance bigint not null)";
const UPDATE: &str = "update account set balance = balance - 1 where id =";
const ANSWERS: &str = "our own server answers";

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
            let prepare = async |check: Option<Function>| {
                let check = check.map(|it| format!("and {} is not null", it.call("$2", "$3")));
                let update = format!("{UPDATE} $1 {}", check.unwrap_or_default());
                client.prepare(&update).await.expect(ANSWERS)
            };
            let (update, update_if_guarded, update_if_fenced) = join3(
                prepare(None),
                prepare(Some(Function::Guard)),
                prepare(Some(Function::Fenced)),
            )
            .await;
            let lock = locks.exclusive(format!("account:{account}"));
            let shared = Shared {
                client: Mutex::new(client),
                update,
                update_if_guarded,
                update_if_fenced,
                account,
                guard: lock.acquire().await.expect("no other client uses this key"),
            };
            payments.push(Self {
                shared: Arc::new(shared),
                check: Check::None,
                trips: Trips::Each,
            });
        }
        payments
    }

    pub(super) fn with(&self, check: Check, trips: Trips) -> Self {
        Self {
            check,
            trips,
            ..self.clone()
        }
    }
}

impl Function {
    fn call(self, name: &str, token: &str) -> String {
        let function = match self {
            Self::Guard => "guard",
            Self::Fenced => "fenced",
        };
        format!("lock_runtime.{function}({name}, {token})")
    }
}

impl Shared {
    /// The name of the lock, and of the account as a resource.
    fn name(&self) -> String {
        format!("lock:account:{}", self.account)
    }

    async fn execute_at_once(&self, client: &Client, check: Check) -> Result<(), Error> {
        // Of our own digits and letters.
        let (name, token) = (format!("'{}'", self.name()), self.guard.fence().to_string());
        let update = format!("{UPDATE} {}", self.account);
        let statements = match check {
            Check::None => update,
            Check::Query => format!("select 1; {update}"),
            Check::Statement(it) => format!("select {}; {update}", it.call(&name, &token)),
            Check::Condition(it) => format!("{update} and {} is not null", it.call(&name, &token)),
        };
        let transaction = format!("begin; {statements}; commit");
        client.batch_execute(&transaction).await
    }

    async fn execute_each(&self, client: &mut Client, check: Check) -> Result<(), Error> {
        let (account, name) = (self.account, self.name());
        let (token, number) = (self.guard.fence(), i64::from(self.guard.fence()));
        let transaction = client.transaction().await?;
        match check {
            Check::Query => drop(transaction.execute_typed("select 1", &[]).await?),
            Check::Statement(Function::Guard) => {
                fencing::guard_named(&transaction, &name, token).await?;
            }
            Check::Statement(Function::Fenced) => {
                fencing::fenced(&transaction, &name, token).await?;
            }
            Check::None | Check::Condition(_) => {}
        }
        let update_if = match check {
            Check::Condition(Function::Guard) => Some(&self.update_if_guarded),
            Check::Condition(Function::Fenced) => Some(&self.update_if_fenced),
            _ => None,
        };
        let updated = match update_if {
            Some(update) => {
                transaction
                    .execute(update, &[&account, &name, &number])
                    .await?
            }
            None => transaction.execute(&self.update, &[&account]).await?,
        };
        assert_eq!(updated, 1);
        transaction.commit().await
    }
}

impl Call for Payment {
    async fn call(&self) {
        let mut client = self.shared.client.lock().await;
        let executed = match self.trips {
            Trips::One => self.shared.execute_at_once(&client, self.check).await,
            Trips::Each => self.shared.execute_each(&mut client, self.check).await,
        };
        executed.expect("our own server answers, and the lock is held");
    }
}

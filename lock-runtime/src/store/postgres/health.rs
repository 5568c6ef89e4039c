//! The health of the server, and the sessions that keep locks from being granted.

use std::sync::Arc;

use tokio::time::timeout;
use tokio_postgres::{Row, types::Type};

use super::{connection::pool::Pool, failure::Failure, statements::field};
use crate::{
    observe::health::{Finding, Health, PATIENCE, ServerHealth, ServerRole, Severity, is_answer},
    observe::text::{brief, in_line},
    shell::time::Instant,
    store::{StoreError, StoreErrorKind, records::Timestamp},
};

const HEALTH: &str = "select lock_runtime.micros(), pg_catalog.current_setting('server_version'), \
    (select pg_catalog.string_agg(p.proname::text, ', ' order by p.proname) from pg_catalog.pg_proc p \
        where p.pronamespace = 'lock_runtime'::pg_catalog.regnamespace::pg_catalog.oid \
        and pg_catalog.has_function_privilege('public', p.oid, 'execute'))";

/// The sessions with a transaction of over two seconds that has locked records, or all of them. A
/// client's own transactions are shorter, and end by themselves.
const LOCKING: &str = "select distinct a.pid, a.usename::text, a.application_name, a.state, \
        extract(epoch from pg_catalog.clock_timestamp() - a.xact_start)::float8 as age \
    from pg_catalog.pg_locks l join pg_catalog.pg_stat_activity a on a.pid = l.pid \
    where l.locktype = 'relation' and l.relation = 'lock_runtime.record'::pg_catalog.regclass::pg_catalog.oid \
        and l.database = (select d.oid from pg_catalog.pg_database d where d.datname = pg_catalog.current_database()) \
        and l.granted and l.mode not in ('AccessShareLock', 'ShareUpdateExclusiveLock', 'SIReadLock') \
        and a.xact_start < pg_catalog.clock_timestamp() - interval '2 s' \
    order by age desc limit 5";

/// The sessions that have locked one record, if its `xmax` is that of a transaction.
const BLOCKING: &str = "select a.pid, a.usename::text, a.application_name, a.state, \
        extract(epoch from pg_catalog.clock_timestamp() - a.xact_start)::float8 \
    from lock_runtime.record r \
    join pg_catalog.pg_locks l on l.locktype = 'transactionid' and l.granted and l.transactionid = r.xmax \
    join pg_catalog.pg_stat_activity a on a.pid = l.pid \
    where r.name = $1 and (a.application_name || ' ') like 'lock-runtime %' is not true";
/// The same, if several sessions have locked it.
const SEVERAL_BLOCKING: &str = "select a.pid, a.usename::text, a.application_name, a.state, \
        extract(epoch from pg_catalog.clock_timestamp() - a.xact_start)::float8 \
    from lock_runtime.record r cross join lateral pg_catalog.pg_get_multixact_members( \
        case when pg_catalog.mxid_age(r.xmax) > 0 then r.xmax end) m \
    join pg_catalog.pg_locks l on l.locktype = 'transactionid' and l.granted and l.transactionid = m.xid \
    join pg_catalog.pg_stat_activity a on a.pid = l.pid \
    where r.name = $1 and r.xmax <> '0' and (a.application_name || ' ') like 'lock-runtime %' is not true";
/// The sessions that have locked records, if this one is locked: its `xmax` may be that of a
/// savepoint which was released, and is seen no more.
const MAY_BLOCK: &str = "with free as materialized ( \
        select from lock_runtime.record r where r.name = $1 and r.xmax <> '0' for update skip locked) \
    select a.pid, a.usename::text, a.application_name, a.state, \
        extract(epoch from pg_catalog.clock_timestamp() - a.xact_start)::float8 \
    from pg_catalog.pg_locks l join pg_catalog.pg_stat_activity a on a.pid = l.pid \
    where l.locktype = 'relation' and l.relation = 'lock_runtime.record'::pg_catalog.regclass::pg_catalog.oid \
        and l.database = (select d.oid from pg_catalog.pg_database d where d.datname = pg_catalog.current_database()) \
        and l.granted and l.mode = 'RowShareLock' and (a.application_name || ' ') like 'lock-runtime %' is not true \
        and a.pid <> pg_catalog.pg_backend_pid() \
        and exists (select from lock_runtime.record r where r.name = $1 and r.xmax <> '0' and not exists ( \
            select from pg_catalog.pg_locks t \
            where t.locktype = 'transactionid' and t.granted and t.transactionid = r.xmax)) \
        and not exists (select from free)";

/// The oldest transaction for which the server keeps earlier versions of rows, and its age in
/// transactions. A brief one only inherits the age of another.
const HORIZON: &str = "select h.age::int8, h.owner from ( \
        select pg_catalog.age(a.backend_xmin), \
            pg_catalog.format('the transaction of process %s of %s', a.pid, \
            coalesce(pg_catalog.quote_ident(a.usename::text), 'the server')) as owner \
        from pg_catalog.pg_stat_activity a \
        where a.backend_xmin is not null and coalesce(a.datname = pg_catalog.current_database(), true) \
        and (a.application_name || ' ') like 'lock-runtime %' is not true \
        and coalesce(a.xact_start < pg_catalog.clock_timestamp() - interval '2 s', false) \
        union all select pg_catalog.age(s.xmin), pg_catalog.format('the replication slot %s', s.slot_name) \
        from pg_catalog.pg_replication_slots s where s.xmin is not null \
        union all select pg_catalog.age(p.transaction), pg_catalog.format('the prepared transaction %I', p.gid) \
        from pg_catalog.pg_prepared_xacts p where p.database = pg_catalog.current_database() \
    ) h order by 1 desc limit 1";
/// The age from which on each change of a busy lock takes twice as long, or longer.
const OLD: i64 = 20_000;

impl Pool {
    pub(super) async fn health(self: &Arc<Self>) -> Health {
        let mut server = ServerHealth::new(self.address());
        let sent = Instant::now();
        let asked = timeout(PATIENCE, self.query_one(HEALTH, &[])).await;
        let asked = asked.unwrap_or(Err(Failure::TimedOut));
        let mut findings = Vec::new();
        match asked
            .map_err(Failure::into_store_error)
            .and_then(|row| facts(&row))
        {
            Ok((now, version, public)) => {
                let public = public.map(|it| public_functions(&it).about(&server.name));
                findings.extend(public);
                findings.extend(
                    self.findings()
                        .await
                        .into_iter()
                        .map(|it| it.about(&server.name)),
                );
                let round_trip = sent.elapsed();
                let own = Timestamp::of_system().micros() as f64;
                let middle = own - round_trip.as_micros() as f64 / 2.0;
                server.clock_difference = Some((now as f64 - middle) / 1e6);
                server.round_trip = Some(round_trip);
                server.version = Some(format!("PostgreSQL {version}"));
                server.role = Some(ServerRole::Primary);
                (server.reachable, server.grants_locks) = (true, true);
            }
            Err(error) => {
                server.reachable = is_answer(&error);
                if error.kind() == StoreErrorKind::ReadOnly {
                    server.role = Some(ServerRole::Replica);
                }
                findings.push(Finding::failed(&error).about(&server.name));
            }
        }
        Health::new(vec![server], findings)
    }

    /// The findings about other sessions. Those of other roles are seen with the right
    /// `pg_read_all_stats` only.
    async fn findings(self: &Arc<Self>) -> Vec<Finding> {
        let asked = timeout(PATIENCE / 2, async {
            (self.call(LOCKING, &[]).await, self.call(HORIZON, &[]).await)
        });
        let (locking, horizon) = match asked.await {
            Ok((locking, horizon)) => (locking.unwrap_or_default(), horizon.unwrap_or_default()),
            Err(_) => return Vec::new(),
        };
        let sessions: Vec<_> = locking.iter().filter_map(|row| session(row).ok()).collect();
        let locked = (!sessions.is_empty()).then(|| {
            let message = format!(
                "sessions keep locks from being granted: {}",
                sessions.join("; ")
            );
            let remedy =
                "end their transactions, or the sessions: select pg_terminate_backend(process)";
            // Transactions with guard() are usual.
            Finding::new(Severity::Notice, "blocked_records", message, remedy)
        });
        let old = horizon.first().and_then(|row| {
            let (age, owner): (i64, String) = (field(row, 0).ok()?, field(row, 1).ok()?);
            let message = format!(
                "{owner} makes the server keep the versions of rows of the last {age} transactions, \
                 which slows down busy locks"
            );
            let remedy = "end it, or keep the locks in a database of their own";
            (age > OLD).then(|| Finding::new(Severity::Warning, "old_horizon", message, remedy))
        });
        locked.into_iter().chain(old).collect()
    }

    /// The sessions, other than clients, that have locked the record of this name.
    pub(super) async fn blockers(self: &Arc<Self>, name: &str) -> Result<Vec<String>, StoreError> {
        let name = [(&name as _, Type::TEXT)];
        let mut rows = self.call(BLOCKING, &name).await;
        if rows.as_ref().is_ok_and(Vec::is_empty) {
            // An error means that the number is not that of several transactions.
            rows = Ok(self.call(SEVERAL_BLOCKING, &name).await.unwrap_or_default());
        }
        if rows.as_ref().is_ok_and(Vec::is_empty) {
            rows = self.call(MAY_BLOCK, &name).await;
        }
        let rows = rows.map_err(Failure::into_store_error)?;
        rows.iter().map(session).collect()
    }
}

/// Describes a session. Parts of those of other roles are hidden from this one.
fn session(row: &Row) -> Result<String, StoreError> {
    let (process, role): (i32, Option<String>) = (field(row, 0)?, field(row, 1)?);
    let (program, state): (Option<String>, Option<String>) = (field(row, 2)?, field(row, 3)?);
    let age: Option<f64> = field(row, 4)?;
    let age = age.and_then(|age| std::time::Duration::try_from_secs_f64(age).ok());
    let details = [
        role.map(|role| format!("of {}", in_list(&role))),
        (program.filter(|it| !it.is_empty())).map(|program| in_list(&program)),
        state,
        age.map(|age| format!("for {}", brief(age))),
    ];
    let details: Vec<_> = details.into_iter().flatten().collect();
    Ok(format!("process {process} ({})", details.join(", ")))
}

/// A name of another session, which may imitate the text around it.
fn in_list(name: &str) -> String {
    let shown = in_line(name).to_string();
    match shown.contains([',', '(', ')']) && !shown.starts_with('"') {
        true => format!("\"{shown}\""),
        false => shown,
    }
}

fn facts(row: &Row) -> Result<(i64, String, Option<String>), StoreError> {
    Ok((field(row, 0)?, field(row, 1)?, field(row, 2)?))
}

fn public_functions(functions: &str) -> Finding {
    let message = format!(
        "every role with the right `usage` on the schema lock_runtime may execute its functions \
         {functions}"
    );
    let remedy = "execute lock_runtime::store::postgres::MIGRATION as the owner of the schema, and \
                  lock_runtime::fencing::MIGRATION where `fenced` is used";
    Finding::new(Severity::Warning, "public_functions", message, remedy)
}
